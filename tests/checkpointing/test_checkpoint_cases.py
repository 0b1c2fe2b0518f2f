"""Planned trainings of every kind of stage against plain ones."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from planned_case import Case, failure
from planned_stages import PAIRS, STAGES

from repro.checkpointing import repeat
from repro.checkpointing.state import ModuleState

#: Every kind of stage between two linear ones.
CHAINS = [
    ("linear", kind, *([PAIRS[kind]] if kind in PAIRS else []), "linear")
    for kind in STAGES
    if kind not in PAIRS.values()
]


@pytest.mark.parametrize("stages", CHAINS, ids=lambda stages: stages[1])
def test_every_kind_of_stage(stages: tuple[str, ...]) -> None:
    case = Case(stages=stages, rows=1025, width=32, between=True, input_gradient=True, steps=2)
    wrong = failure(case)
    assert wrong is None, f"{wrong}\n  {case}"


def test_two_steps_open_at_once_have_a_state_each() -> None:
    assert failure(Case(stages=("buffer", "dropout", "counter", "tanh"), way="twice")) is None


def test_training_restarts_from_what_was_saved() -> None:
    case = Case(stages=("linear", "batch-norm", "dropout", "spectral", "buffer"), steps=3, restart=2, strategy="sqrt")
    assert failure(case) is None


@pytest.mark.parametrize("dynamic", ["stages", "around"])
def test_compiled_for_any_number_of_rows(dynamic: str) -> None:
    stages = ("shared", "dropout", "relu_", "fork", "join")
    case = Case(stages=stages, steps=3, dynamic=dynamic, input_gradient=True, way="twice")
    assert failure(case) is None


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(ValueError, match=r"\['nonsense'\]"):
        failure(Case(stages=("nonsense",)))


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault planted: state is not restored, and nobody compares."""
    monkeypatch.setattr(ModuleState, "in_force", lambda self, stage: nullcontext())
    monkeypatch.setattr(repeat, "difference", lambda first, second: ("", None))
    assert failure(Case(stages=("tanh", "buffer", "linear"), rows=8, steps=2, seed=3))
    assert failure(Case(stages=("fork", "shared"))) is None  # the plain one fails too
