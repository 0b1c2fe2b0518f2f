"""Random planned trainings against plain ones: the fuzzer's cases, and that it finds faults."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from repro import fuzz
from repro.checkpointing import cases, repeat
from repro.checkpointing.case_stages import PAIRS, STAGES
from repro.checkpointing.cases import Case
from repro.checkpointing.state import ModuleState

#: Every kind of stage between two linear ones.
CHAINS = [
    ("linear", kind, *([PAIRS[kind]] if kind in PAIRS else []), "linear")
    for kind in STAGES
    if kind not in PAIRS.values()
]


@pytest.mark.parametrize("stages", CHAINS, ids=lambda stages: stages[1])
def test_every_kind_of_stage(stages: tuple[str, ...]) -> None:
    case = Case(stages=stages, rows=4, between=True, input_gradient=True, steps=2)
    wrong = fuzz.complaint(case, "cpu")
    assert wrong is None, f"{wrong}\n  {fuzz.command(case, 'cpu')}"


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(seed: int) -> None:
    case = cases.replace(cases.draw(7000 + seed), ranks=1)
    wrong = fuzz.complaint(case, "cpu")
    assert wrong is None, f"{wrong}\n  {fuzz.command(case, 'cpu')}"


def test_training_restarts_from_what_was_saved() -> None:
    case = Case(
        stages=("linear", "batch-norm", "dropout", "spectral", "buffer"), steps=3, restart=2,
        strategy="sqrt",
    )  # fmt: skip
    assert cases.failure(case) is None


@pytest.mark.parametrize("dynamic", ["stages", "around"])
def test_compiled_for_any_number_of_rows(dynamic: str) -> None:
    stages = ("linear", "dropout", "shared", "relu_", "shared", "fork", "join")
    case = Case(stages=stages, steps=3, dynamic=dynamic, input_gradient=True, way="twice")
    assert cases.failure(case) is None


def test_everything_is_drawn() -> None:
    drawn = [cases.draw(seed) for seed in range(1000)]
    assert {case.dynamic for case in drawn} == {"", "stages", "around"}
    assert {case.wrap for case in drawn if case.ranks == 2} == set(cases.WRAPS)
    assert {kind for case in drawn for kind in case.stages} == set(STAGES)
    assert {case.way for case in drawn} == set(cases.WAYS)
    assert {case.restart for case in drawn} == {0, 1, 2}


def test_cases_survive_their_spelling() -> None:
    for seed in range(50):
        case = cases.draw(seed)
        assert Case.from_json(case.to_json()) == case
    with pytest.raises(TypeError, match="colour"):
        Case.from_json(json.dumps({"colour": 1}))
    with pytest.raises(TypeError, match="rows='x' is a str"):
        Case.from_json('{"rows": "x"}')
    with pytest.raises(TypeError, match=r"case=\[\] is a list, not a dict"):
        Case.from_json("[]")
    with pytest.raises(ValueError, match=r"\['nonsense'\]"):
        cases.failure(Case(stages=("nonsense",)))


def test_the_fuzzer_finds_and_shrinks_a_fault(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a fault planted (state is not restored, and nobody compares) it reports a small case."""
    monkeypatch.setattr(ModuleState, "in_force", lambda self, stage: nullcontext())
    monkeypatch.setattr(repeat, "difference", lambda first, second: ("", None))
    start = Case(stages=("tanh", "residual", "buffer", "tanh", "linear"), rows=8, steps=2, seed=3)
    assert fuzz.complaint(start, "cpu")
    assert fuzz.complaint(Case(stages=("fork", "shared")), "cpu") is None  # the plain one fails too
    small = fuzz.shrink(start, "cpu", float("inf"))
    assert "buffer" in small.stages
    assert (len(small.stages), small.rows, small.steps) == (2, 3, 1)  # one stage runs once
    line = fuzz.command(small, "cpu")
    assert line.startswith("python -m repro.fuzz --of planned --case '{")
    assert fuzz.main(["--of", "planned", "--case", small.to_json()]) == 1
    assert fuzz.main(["--of", "planned", "--case", Case().to_json()]) == 0
    assert "FAILED step 0: " in capfd.readouterr().err


def test_all_kinds_take_turns(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def look(case: object, device: str) -> str | None:
        seen.append(fuzz.kind_of(case))
        return "found" if len(seen) == 12 * len(fuzz.KINDS) else None

    monkeypatch.setattr(fuzz, "complaint", look)
    monkeypatch.setattr(fuzz, "shrink", lambda case, device, until: case)
    assert fuzz.fuzz(60.0, 1, "cpu", tuple(fuzz.KINDS), max_failures=1) == 1
    assert seen[: 12 * len(fuzz.KINDS)] == [kind for kind in fuzz.KINDS for _ in range(12)]
    counts = ", ".join(f"12 {kind}" for kind in fuzz.KINDS)
    assert f"{counts} cases, 1 failed" in capfd.readouterr().err
