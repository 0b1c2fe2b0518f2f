"""The optimum: never above its budget, never behind a heuristic, monotone, judged by a MILP."""

import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.checkpointing import (
    Chain,
    InfeasibleBudgetError,
    OptimalTable,
    Stage,
    exact,
    greedy,
    optimal,
    simulate,
    smallest_budget,
    store_all,
    uniform_chain,
)
from analysis.checkpointing.native import library
from analysis.checkpointing.optimal import heuristic_plans


def random_chain(seed: int, length: int, largest: int = 40, kinds: int = 99) -> Chain:
    """Uneven stages; with few `kinds` they repeat."""
    rng = random.Random(seed)

    def size() -> int:
        return rng.randint(0, largest)

    palette = [
        Stage(
            size(), size(), rng.choice([None, size()]), size(), size(), size(), rng.uniform(0.1, 2), rng.uniform(0.1, 2)
        )
        for _ in range(min(kinds, length))
    ]
    return Chain(tuple(rng.choice(palette) for _ in range(length)), size(), size())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(1, 12),
    largest=st.sampled_from([9, 200, 99_991]),
    slots=st.sampled_from([20, 60]),
)
def test_plans_fit_and_beat_every_heuristic_and_larger_budgets_never_cost_more(
    seed: int, length: int, largest: int, slots: int
) -> None:
    """With few slots every size is rounded up, which must not cost any of these properties."""
    chain = random_chain(seed, length, largest)
    least, most = smallest_budget(chain), store_all(chain).peak_bytes
    heuristics = heuristic_plans(chain)
    before = np.inf
    for share in (0, 0.1, 0.3, 0.5, 0.8, 1, 1.2):
        budget = round(least + share * (most - least))
        plan = optimal(chain, budget, slots=slots)
        replay = simulate(chain, plan.schedule)
        assert replay.peak_bytes == plan.peak_bytes <= budget
        assert replay.seconds == pytest.approx(plan.seconds)
        for other in heuristics:
            if other.peak_bytes <= budget:
                assert plan.seconds <= other.seconds * (1 + 1e-9), other.name
        assert plan.seconds <= before * (1 + 1e-9)
        before = plan.seconds
    assert plan.advances == 0  # enough memory, nothing runs twice


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(2, 10))
def test_too_small_a_budget_names_the_smallest_feasible_one(seed: int, length: int) -> None:
    chain = random_chain(seed, length)
    least = smallest_budget(chain)
    assert optimal(chain, least).peak_bytes == least
    with pytest.raises(InfeasibleBudgetError, match=f"smallest feasible budget is {least} bytes"):
        optimal(chain, least - 1)


def test_an_infeasible_budget_is_refused_before_any_table_is_filled(monkeypatch) -> None:
    """The answer comes at once, however long the chain."""

    def fill(*_: object) -> None:
        raise AssertionError("the table takes seconds")

    monkeypatch.setattr(sys.modules[optimal.__module__], "_table", fill)
    chain = random_chain(5, 150)
    with pytest.raises(InfeasibleBudgetError, match=f"is {smallest_budget(chain)} bytes"):
        optimal(chain, 1)


@pytest.mark.parametrize("seed", range(6))
def test_integer_programme_never_loses_and_seldom_wins(seed: int) -> None:
    """The programme may drop and recompute checkpoints at will; planners keep them until used.

    On these chains that freedom is worth nothing, so the two must agree."""
    chain = random_chain(seed, 4 if seed % 2 else 5, 20)
    least, most = smallest_budget(chain), store_all(chain).peak_bytes
    budget = (least + most) // 2
    judged = exact(chain, budget)
    plan = optimal(chain, budget)
    assert judged.peak_bytes <= budget
    assert judged.seconds <= plan.seconds + 1e-6
    assert judged.seconds == pytest.approx(plan.seconds)


def test_integer_programme_has_limits() -> None:
    with pytest.raises(ValueError, match="9 stages: the integer programme takes at most 8"):
        exact(uniform_chain(9), 10)
    with pytest.raises(InfeasibleBudgetError, match="smallest feasible budget"):
        exact(uniform_chain(3), 2)


def test_equal_stages_without_interiors_are_revolves_problem() -> None:
    """With memory for s states the optimum repeats as many runs as the binomial schedule, unless
    keeping stages whole is worth more than checkpoints (their outputs are the same bytes here)."""
    from analysis.checkpointing import revolve

    for length, states in ((10, 2), (10, 3), (56, 3), (40, 5)):
        chain = uniform_chain(length)
        binomial = revolve(chain, states)
        best = optimal(chain, binomial.peak_bytes)
        assert best.advances <= binomial.advances
        heavy = uniform_chain(length, 1, 1000)  # interiors that never fit twice
        binomial = revolve(heavy, states)
        assert optimal(heavy, binomial.peak_bytes, slots=2000).advances == binomial.advances


@pytest.mark.skipif(library("double") is None, reason="no C compiler here")
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(1, 30),
    kinds=st.sampled_from([2, 99]),
    unit=st.integers(1, 9),
    slots=st.integers(1, 700),
)
def test_compiled_table_equals_numpy_table(seed: int, length: int, kinds: int, unit: int, slots: int) -> None:
    chain = random_chain(seed, length, kinds=kinds)
    compiled = OptimalTable(chain, unit, slots).rows
    plain = OptimalTable(chain, unit, slots, native=False).rows
    assert np.array_equal(np.isfinite(compiled), np.isfinite(plain))
    assert np.allclose(compiled, plain, rtol=1e-12, atol=1e-12)


def test_a_thousand_stages_at_500_slots() -> None:
    chain = uniform_chain(1000, 2, 3)
    plan = optimal(chain, chain.input_bytes + 500)
    assert plan.peak_bytes <= chain.input_bytes + 500
    assert simulate(chain, plan.schedule).advances == plan.advances < 1000


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(2, 12))
def test_greedy_plans_fit_or_name_their_least_budget(seed: int, length: int) -> None:
    chain = random_chain(seed, length)
    budget = (smallest_budget(chain) + store_all(chain).peak_bytes) // 2
    try:
        plan = greedy(chain, budget)
    except InfeasibleBudgetError as error:
        least, budget = budget, error.smallest_budget_bytes
        plan = greedy(chain, budget)
        if budget <= least:
            pytest.fail(f"{least} is called too small, {budget} is not")
    replay = simulate(chain, plan.schedule)
    assert replay.peak_bytes == plan.peak_bytes <= budget
    assert optimal(chain, budget).seconds <= plan.seconds * (1 + 1e-9)
