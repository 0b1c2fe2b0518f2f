"""A measurement run that is killed at any line goes on to the same records: nothing lost, nothing
twice. (Files cut at every byte are in ``test_records_reliability.py``.)"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from repro import machine, records
from repro.experiments import Cell, Context, Experiment, record, run
from repro.records import Record

CELLS = 5
#: What a run executes between two cells; a kill lands on one of the lines of these modules.
WATCHED = {str(Path(module.__file__).resolve()) for module in (run, records)}


def toy(root: Path) -> Experiment:
    """Three rows a cell; cell 3 fails until the file "well" is there."""

    def measure(cell: Cell, context: Context) -> list[Record]:
        with open(root / "seen", "a", encoding="utf-8") as seen:
            seen.write(f"{cell.id}\n")
        if cell["seqlen_q"] == 3 and not (root / "well").exists():
            raise RuntimeError("not well")
        return [
            record(cell, experiment="toy", source="measured", metric="n", unit="1", value=i)
            for i in range(3)
        ]

    return Experiment(
        name="toy", title="", device="cpu", sources=("repro/records.py",), predict=lambda _: [],
        cells=lambda: [Cell(implementation="flash", seqlen_q=n) for n in range(CELLS)],
        measure=measure,
    )  # fmt: skip


class Lines:
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


class ShortWrites:
    """``os.write`` that writes little at a time, as it may, so that kills leave half a cell."""

    def __init__(self) -> None:
        self.count, self._write = 0, os.write
        self.kill_after: int | None = None

    def __call__(self, fd: int, data: bytes) -> int:
        written = self._write(fd, data[:100])
        self.count += 1
        if self.count == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def in_child(root: Path, again: bool, kill_at: int | None = None) -> int:
    """Measure in a process of its own, killed before the given line; how the process ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:  # the child never returns into pytest
        if kill_at is not None:
            sys.settrace(
                Lines(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == kill_at else None)
            )
        run.measure(toy(root), root=root, again=again)
        os._exit(0)
    except BaseException:
        os._exit(1)


def lines_of_a_run(root: Path, again: bool) -> int:
    counter = Lines(lambda _: None)
    before = sys.gettrace()
    sys.settrace(counter)
    try:
        run.measure(toy(root), root=root, again=again)
    finally:
        sys.settrace(before)
    return counter.count


def good(path: Path) -> set[str]:
    """Cells on record without an error; a cell has all of its rows or none."""
    rows: dict[str, list[Record]] = {}
    for r in records.read(path):
        assert r.cell is not None
        rows.setdefault(r.cell, []).append(r)
    done = {cell for cell, found in rows.items() if found[0].error is None}
    assert {len(rows[cell]) for cell in done} <= {3}
    assert all(len(rows[cell]) == 1 for cell in set(rows) - done)
    return done


def seen(root: Path) -> list[str]:
    path = root / "seen"
    return path.read_text(encoding="utf-8").split() if path.exists() else []


@pytest.mark.filterwarnings("ignore:.*(torn|incomplete)")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_random_lines_a_run_goes_on_to_the_same_records(
    seed: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provenance = machine.provenance("cpu")  # asked once: the date may change meanwhile
    monkeypatch.setattr(machine, "provenance", lambda _: dict(provenance))
    writes = ShortWrites()
    monkeypatch.setattr(os, "write", writes)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for root in (whole, broken):
        root.mkdir()
    if again:  # both start from a finished run with a failed cell
        for root in (whole, broken):
            run.measure(toy(root), root=root)
            assert len(good(root / "local" / "toy.jsonl")) == CELLS - 1
    (whole / "well").touch()
    writes.count = 0
    lines = lines_of_a_run(whole, again)
    pieces, writes.count = writes.count, 0

    path = broken / "local" / "toy.jsonl"
    chance, kills = random.Random(seed), 0
    for attempt in range(5):
        if attempt == 2:
            (broken / "well").touch()  # the failed cell's row is replaced by good ones
        before, measured = good(path), len(seen(broken))
        left = attempt + 2  # less and less is left to do
        if attempt % 2 or again:  # a cell is replaced by a new file, not by appended pieces
            ended = in_child(broken, again, kill_at=chance.randint(1, lines // left))
        else:  # lines that write are few
            writes.kill_after = chance.randint(1, pieces // left)
            ended = in_child(broken, again)
            writes.kill_after = None
        assert ended in (0, -signal.SIGKILL)
        kills += ended != 0
        assert before <= good(path), "a cell on record was lost"
        now = seen(broken)[measured:]
        assert len(now) == len(set(now))
        assert again or not before & set(now), "a cell on record was measured again"
    assert kills
    assert in_child(broken, again) == 0

    def by_cell(root: Path) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for r in records.read(root / "local" / "toy.jsonl"):
            found.setdefault(str(r.cell), []).append(r.to_json())
        return found

    assert by_cell(broken) == by_cell(whole)
    assert len(good(path)) == CELLS
    assert [p.name for p in path.parent.iterdir()] == ["toy.jsonl"], "no draft, no lock is left"
