"""Drawn planned trainings are, bit for bit, what the plain model does, at the memory predicted."""

from __future__ import annotations

from fuzzing import fuzzed
from hypothesis import strategies as st

from repro.checkpointing.case_stages import PAIRS, STAGES
from repro.checkpointing.case_training import WAYS
from repro.checkpointing.cases import PLAIN_STRATEGIES, Case, failure

KINDS = st.sampled_from(sorted(set(STAGES) - set(PAIRS.values())))


def chain(kinds: list[str]) -> tuple[str, ...]:
    """Each fork with its join."""
    return tuple(stage for kind in kinds for stage in (kind, PAIRS.get(kind)) if stage)


@fuzzed(
    st.builds(
        Case,
        stages=st.lists(KINDS, min_size=1, max_size=9).map(chain),
        strategy=st.sampled_from([*PLAIN_STRATEGIES, "budget"]),
        share=st.sampled_from([0.0, 0.1, 0.3, 0.6]),
        rows=st.sampled_from([2, 3, 8, 33]),
        width=st.sampled_from([4, 6, 16]),
        autocast=st.sampled_from(["", "forward", "step"]),
        way=st.sampled_from(WAYS),
        input_gradient=st.booleans(),
        between=st.booleans(),
        steps=st.integers(1, 3),
        seed=st.integers(0, 2**31 - 1),
    ),
    examples=10,
)
def test_any_planned_training_is_the_plain_one(case: Case) -> None:
    wrong = failure(case)
    assert wrong is None, f"{wrong}\n  {case}"
