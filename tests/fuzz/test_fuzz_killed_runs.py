"""A measurement run that is killed at drawn lines goes on to the same records: nothing lost,
nothing twice."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import pytest
from fuzzing import fuzzed
from hypothesis import strategies as st

from analysis import files
from repro.experiments import Cell, Context, Experiment, Row, row, run
from repro.measuring import machine, progress, records, row_files
from repro.measuring.records import Record

#: What a run executes between two cells; a kill lands on one of the lines of these modules.
WATCHED = {str(Path(str(module.__file__)).resolve()) for module in (run, row_files, files)}


@dataclass(frozen=True)
class Case:
    """cells: how many, of rows rows each; cell 3 fails until two attempts are over.  again: all are
    measured anew, over a finished run.  kills: attempts before the one that may end."""

    cells: int = 5
    rows: int = 3
    again: bool = False
    kills: int = 5
    seed: int = 0


@fuzzed(
    st.builds(
        Case,
        cells=st.integers(1, 7),
        rows=st.integers(1, 4),
        again=st.booleans(),
        kills=st.integers(1, 6),
        seed=st.integers(0, 2**31 - 1),
    ),
    examples=8,
)
def test_killed_at_any_line_a_run_goes_on_to_the_same_records(case: Case) -> None:
    assert failure(case) is None


@pytest.mark.parametrize("fault", ["a line lost", "a cell measured again"])
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "a line lost":
        monkeypatch.setattr(records, "append", lambda path, rows: records.replace(path, {"none"}, rows[:1]))
    else:
        monkeypatch.setattr("repro.experiments.run.pending", lambda cells, known, digest: cells)
    assert failure(Case(seed=3, rows=4)) is not None


def failure(case: Case) -> str | None:
    """Measure without a kill, and with kills; where the two records differ, or None.

    No cell on record is lost or measured again, each has all of its rows or none, and no draft or
    lock is left.
    """
    provenance = machine.provenance("cpu")  # asked once: the date may change meanwhile
    with (
        tempfile.TemporaryDirectory() as place,
        mock.patch.object(machine, "provenance", side_effect=lambda _: dict(provenance)),
        mock.patch.object(progress, "say"),
        mock.patch.object(run, "say"),
    ):
        try:
            _compare(case, Path(place))
        except AssertionError as wrong:
            return str(wrong)
    return None


def _compare(case: Case, place: Path) -> None:
    whole, broken = place / "whole", place / "broken"
    for root in (whole, broken):
        root.mkdir()
        if case.again:  # both start from a finished run with a failed cell
            run.measure(_toy(case, root), root=root)
    (whole / "well").touch()
    lines = _lines_of_a_run(case, whole)

    path = broken / "local" / "toy.jsonl"
    chance = Random(case.seed)
    for attempt in range(case.kills):
        if attempt == 2:
            (broken / "well").touch()  # the failed cell's row is replaced by good ones
        before, measured = _good(case, path), len(_seen(broken))
        left = attempt + 2  # less and less is left to do
        ended = _in_child(case, broken, kill_at=chance.randint(1, max(1, lines // left)))
        now = _seen(broken)[measured:]
        _require(ended in (0, -signal.SIGKILL), f"attempt {attempt} ended with {ended}")
        lost = before - _good(case, path)
        _require(not lost, f"attempt {attempt}: {len(lost)} cells on record were lost")
        _require(len(now) == len(set(now)), f"attempt {attempt}: a cell was measured twice")
        _require(case.again or not before & set(now), f"attempt {attempt}: a cell on record was measured again")
    (broken / "well").touch()
    ended = _in_child(case, broken)
    _require(ended == 0, f"the last run ended with {ended}")
    _require(_by_cell(broken) == _by_cell(whole), "records differ from those of a whole run")
    _require(len(_good(case, path)) == case.cells, "a cell is not on record")
    names = sorted(p.name for p in path.parent.iterdir())
    _require(names == ["toy.jsonl"], f"left in the folder: {names}")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def _toy(case: Case, root: Path) -> Experiment:
    """Cell 3 fails until the file "well" is there."""

    def measure(cell: Cell, context: Context) -> list[Row]:
        with open(root / "seen", "a", encoding="utf-8") as seen:
            seen.write(f"{cell.id}\n")
        if cell["seqlen_q"] == 3 and not (root / "well").exists():
            raise RuntimeError("not well")
        return [row("n", i) for i in range(case.rows)]

    return Experiment(
        name="toy",
        device="cpu",
        sources=("repro/measuring/records.py",),
        cells=lambda: [Cell(implementation="flash", seqlen_q=n) for n in range(case.cells)],
        measure=measure,
    )


class _Lines:
    """Calls ``at`` with the number of each line that runs in the watched modules."""

    def __init__(self, at: Callable[[int], None]) -> None:
        self.count, self._at = 0, at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code: CodeType = frame.f_code
        if code.co_filename not in WATCHED:
            return None
        if event == "line":
            self.count += 1
            self._at(self.count)
        return self


@contextmanager
def _traced(trace: _Lines) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _in_child(case: Case, root: Path, kill_at: int | None = None) -> int:
    """Measure in a process of its own, killed before the given line; how the process ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:  # the child never returns to the caller
        kill = _Lines(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == kill_at else None)
        if kill_at is not None:
            sys.settrace(kill)
        run.measure(_toy(case, root), root=root, again=case.again)
        os._exit(0)
    except BaseException:
        os._exit(1)


def _lines_of_a_run(case: Case, root: Path) -> int:
    counter = _Lines(lambda _: None)
    with _traced(counter):
        run.measure(_toy(case, root), root=root, again=case.again)
    return counter.count


def _good(case: Case, path: Path) -> set[str]:
    """Cells on record without an error; a cell has all of its rows or none."""
    rows: dict[str, list[Record]] = {}
    for r in records.read(path):
        rows.setdefault(str(r.cell), []).append(r)
    done = {cell for cell, found in rows.items() if found[0].error is None}
    for cell, found in rows.items():
        _require(len(found) == (case.rows if cell in done else 1), f"a cell has {len(found)} of its {case.rows} rows")
    return done


def _by_cell(root: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for r in records.read(root / "local" / "toy.jsonl"):
        found.setdefault(str(r.cell), []).append(r.to_json())
    return found


def _seen(root: Path) -> list[str]:
    path = root / "seen"
    return path.read_text(encoding="utf-8").split() if path.exists() else []
