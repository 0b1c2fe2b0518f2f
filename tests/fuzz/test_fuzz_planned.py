"""Drawn planned trainings are, bit for bit, what the plain model does, at the memory predicted."""

from __future__ import annotations

from dataclasses import replace

from fuzzing import SECONDS, fuzzed
from hypothesis import strategies as st
from planned_case import PLAIN_STRATEGIES, Case, failure
from planned_stages import PAIRS, STAGES
from planned_training import WAYS, WRAPS

KINDS = st.sampled_from(sorted(set(STAGES) - set(PAIRS.values())))
#: Processes and compilers take seconds a case: one in twenty has them, and in ``make test`` none.
RARELY = [0] * 19 + [1] if SECONDS else [0]


def chain(kinds: list[str]) -> tuple[str, ...]:
    """Each fork with its join."""
    return tuple(stage for kind in kinds for stage in (kind, PAIRS.get(kind)) if stage)


@st.composite
def trainings(draw: st.DrawFn) -> Case:
    steps = draw(st.integers(1, 3))
    case = Case(
        stages=chain(draw(st.lists(KINDS, min_size=1, max_size=9))),
        strategy=draw(st.sampled_from([*PLAIN_STRATEGIES, "budget"])),
        share=draw(st.sampled_from([0.0, 0.1, 0.3, 0.6])),
        rows=draw(st.sampled_from([2, 3, 8, 33, 1025])),
        width=draw(st.sampled_from([4, 6, 16, 32])),
        autocast=draw(st.sampled_from(["", "forward", "step"])),
        way=draw(st.sampled_from(WAYS)),
        input_gradient=draw(st.booleans()),
        between=draw(st.booleans()),
        steps=steps,
        restart=draw(st.integers(0, steps - 1)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )
    if draw(st.sampled_from(RARELY)):
        way = draw(st.sampled_from(["plain", "twice", "kept"]))
        return replace(case, ranks=2, way=way, wrap=draw(st.sampled_from(WRAPS)))
    if draw(st.sampled_from(RARELY)):
        dynamic = draw(st.sampled_from(["stages", "around"]))
        return replace(case, dynamic=dynamic, steps=3, autocast="")
    return case


@fuzzed(trainings(), examples=10)
def test_any_planned_training_is_the_plain_one(case: Case) -> None:
    wrong = failure(case)
    assert wrong is None, f"{wrong}\n  {case}"
