"""Every planner's plan is replayed by a simulator that knows no planner: same peak, same runs."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.checkpointing import (
    Chain,
    Plan,
    Stage,
    chen_recursive,
    chen_search,
    every,
    exponential,
    exponential_recursive,
    recompute_all,
    revolve,
    selective,
    simulate,
    sqrt,
    store_all,
    uniform,
    uniform_chain,
)
from analysis.checkpointing.heuristics import chen_budget_segments, segment_starts
from analysis.checkpointing.revolve import advances

PLANNERS: dict[str, Callable[[Chain], Plan]] = {
    "store all": store_all,
    "recompute all": recompute_all,
    "sqrt": sqrt,
    "exponential": exponential,
    "exponential, recursive": exponential_recursive,
    "recursive k=1": chen_recursive,
    "recursive k=3": lambda chain: chen_recursive(chain, 3),
    "Chen's search": chen_search,
    "every 2": lambda chain: every(chain, 2),
    "every 3, last too": lambda chain: every(chain, 3, keep_last=False),
    "every stage, last too": lambda chain: every(chain, 1, keep_last=False),
    "revolve": lambda chain: revolve(chain, 3),
}

sizes = st.integers(0, 60)
stages = st.builds(
    Stage,
    activation_bytes=sizes,
    saved_bytes=sizes,
    gradient_bytes=st.none() | sizes,
    forward_temporary_bytes=sizes,
    saving_temporary_bytes=sizes,
    backward_temporary_bytes=sizes,
    forward_s=st.floats(0, 9),
    backward_s=st.floats(0, 9),
    kind=st.sampled_from(["attention", "mlp"]),
)
chains = st.builds(Chain, st.lists(stages, min_size=1, max_size=14).map(tuple), sizes, input_gradient_bytes=sizes)


@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=40, deadline=None)
@given(chain=chains)
def test_replay_costs_what_the_planner_predicts(name: str, chain: Chain) -> None:
    plan = PLANNERS[name](chain)
    replay = simulate(chain, plan.schedule)
    assert replay.peak_bytes == plan.peak_bytes
    assert replay.forwards == plan.forwards
    assert replay.advances == plan.advances
    assert replay.seconds == pytest.approx(plan.seconds)


@settings(max_examples=40, deadline=None)
@given(chain=chains)
def test_selective_runs_exactly_the_chosen_kind_again(chain: Chain) -> None:
    if not any(stage.kind == "attention" for stage in chain.stages):
        with pytest.raises(ValueError, match="attention"):
            selective(chain)
        return
    replay = simulate(chain, selective(chain).schedule)
    assert replay.peak_bytes == selective(chain).peak_bytes
    expected = [1 + (stage.kind == "attention") for stage in chain.stages]
    expected[-1] = 1  # its backward follows its forward at once
    assert list(replay.forwards_by_stage) == expected


@pytest.mark.parametrize(
    ("length", "states", "expected"),
    [
        (1, 3, 0),
        (4, 4, 3),
        (4, 3, 3),
        (4, 2, 4),
        (4, 1, 6),
        (6, 2, 8),
        (10, 1, 45),
        (10, 2, 20),
        (10, 3, 15),
        (20, 3, 45),
        (56, 3, 210),
    ],
)
def test_revolve_advances_with_the_input_counted_as_a_state(length: int, states: int, expected: int) -> None:
    """The closed form, the plan and its replay agree."""
    assert advances(length, states) == expected
    chain = uniform_chain(length)
    plan = revolve(chain, states)
    assert plan.advances == simulate(chain, plan.schedule).advances == expected


def test_revolve_closed_form_is_the_recurrence() -> None:
    longest, most = 70, 8
    table = {(n, 1): n * (n - 1) // 2 for n in range(1, longest + 1)}
    for s in range(2, most + 1):
        table[1, s] = 0
        for n in range(2, longest + 1):
            table[n, s] = min(k + table[k, s] + table[n - k, s - 1] for k in range(1, n))
    assert all(advances(n, s) == value for (n, s), value in table.items())


@pytest.mark.parametrize(("length", "states"), [(1000, 10), (1000, 400), (400, 400), (3, 50)])
def test_revolve_plans_long_chains_and_many_states(length: int, states: int) -> None:
    chain = uniform_chain(length)
    plan = revolve(chain, states)
    assert plan.advances == advances(length, min(states, length))
    # `states` states (the input among them), one reached from the last of them where there are
    # fewer states than stages, the stage in hand and its two gradients
    assert plan.peak_bytes == min(states, length) + (states < length) + 1 + 2


def test_segments_cover_every_stage_once() -> None:
    assert segment_starts(16, 4) == [1, 5, 9, 13]
    starts = segment_starts(17, 4)
    lengths = [b - a for a, b in zip(starts, [*starts[1:], 18], strict=True)]
    assert sorted(lengths) == [4, 4, 4, 5]
    two = uniform_chain(2)
    for segments, forwards in ((1, 2), (2, 3)):
        assert simulate(two, uniform(two, segments).schedule).forwards == forwards
    for wrong in (0, -1, 3):
        with pytest.raises(ValueError, match=rf"{wrong} segments for 2 stages"):
            uniform(two, wrong)
    one = uniform_chain(1)
    assert simulate(one, sqrt(one).schedule).forwards == 1
    assert sqrt(uniform_chain(16)).forwards == 16 + 12
    with pytest.raises(ValueError, match="at least 1 stage, got 0"):
        uniform_chain(0)


def test_chen_algorithm_3_cuts_where_the_sum_passes_the_budget() -> None:
    chain = uniform_chain(9, 1, 1)
    assert chen_budget_segments(chain, 0) == list(range(1, 10))
    assert chen_budget_segments(chain, 5) == [1, 4, 7]
    assert chen_budget_segments(chain, 100) == [1]


def test_chen_search_beats_sqrt_on_an_uneven_chain() -> None:
    """Equal segment lengths ignore sizes; the search's segments have equal bytes."""
    chain = Chain(tuple(Stage(1, 1 if i < 80 else 200) for i in range(100)), 1)
    assert chen_search(chain).peak_bytes < 0.75 * sqrt(chain).peak_bytes


def test_exponential_spacing_alone_keeps_half_the_chain() -> None:
    """The notes claim O(log L); the last part is L/2 stages.  Splitting the parts the same way
    gives log^2, halving gives log, and both pay O(L log L) forward runs instead of O(log L)."""
    chain = uniform_chain(1024)
    log_length = 10
    assert exponential(chain).peak_bytes > 512
    assert exponential_recursive(chain).peak_bytes == log_length * (log_length + 1) // 2 + 4
    assert chen_recursive(chain).peak_bytes == log_length + 4
    assert chen_recursive(chain).advances == 1024 * log_length // 2
    assert exponential_recursive(chain).advances == 1024 * (log_length + 1) // 4


def test_errors_name_both_values() -> None:
    with pytest.raises(ValueError, match="segments of 0 stages"):
        every(uniform_chain(3), 0)
    with pytest.raises(ValueError, match="k=0"):
        chen_recursive(uniform_chain(3), 0)
    with pytest.raises(ValueError, match="length=3, states=0"):
        revolve(uniform_chain(3), 0)
    with pytest.raises(ValueError, match="saved_bytes is -1"):
        Stage(1, -1)
    with pytest.raises(ValueError, match="backward_temporary_bytes -9"):
        Chain((Stage(1, backward_temporary_bytes=-9),), 1, input_gradient_bytes=4)
