"""Measures experiments cell by cell and stores the rows as they come.

A run holds the experiment's records, so a second run of it waits and then finds the cells done.

A cell is done when it has rows without an error that were measured from the same code. Done cells
are skipped, so an interrupted run (Ctrl-C, a crash, a reboot) goes on where it stopped and loses at
most the cell it was in. A failed cell becomes a row with ``error`` and is tried again next time.
Where no cell can be measured for want of a profiler or a permission, the run ends with that reason
and writes no rows of errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.experiments import SMALL, Cell, Context, Experiment, UnavailableError
from repro.measuring import machine, records
from repro.measuring.progress import say, track
from repro.measuring.ranks import Rank
from repro.measuring.records import Record


@dataclass(frozen=True)
class Outcome:
    """What a run of one experiment did; ``reason`` says why nothing could be measured."""

    measured: int = 0
    skipped: int = 0
    failed: int = 0
    reason: str | None = None


def device_reason(device: str) -> str | None:
    """Why nothing can be measured on this device here, or None where it can."""
    if device == "none":
        return "has recorded and published rows only"
    if device == "cuda" and machine.gpu() is None:
        return "needs an NVIDIA GPU, none found"
    return None


def folder(device: str, into: str | None = None) -> str:
    """The folder under results/ for measurements on this device."""
    if into is not None:
        return records.require_folder(into)
    if device == "cuda":
        card = machine.gpu()
        if card is None:
            raise RuntimeError("no NVIDIA GPU found")
        return card.slug
    return "local"


def measure(
    experiment: Experiment,
    *,
    into: str | None = None,
    again: bool = False,
    quick: bool = False,
    root: Path | None = None,
    rank: Rank | None = None,
) -> Outcome:
    """Measure the cells of one experiment that are not on record yet.

    into: folder under results/ (default: the GPU's name, or "local" for host and CPU);
    again: measure recorded cells anew, and forget cells that are no longer listed;
    quick: leave experiments that are long and on record;
    rank: measure this rank's share of the cells, into its own file.
    """
    if into is not None:
        records.require_folder(into)
    reason = device_reason(experiment.device)
    if reason is not None:
        return Outcome(reason=reason)
    given, root = root, root or records.RESULTS
    on_record = experiment.scale == SMALL and bool(records.recorded("host", experiment.name, given))
    if quick and experiment.on_demand and on_record:
        return Outcome(reason=f"long and on record, `make measure EXPERIMENT={experiment.name}`")
    cells = list(experiment.cells())
    _require_distinct(cells)
    path = root / folder(experiment.device, into) / f"{experiment.name}.jsonl"
    merged: list[Record] = []
    if rank is not None:
        merged = list(records.read(path))
        cells, path = rank.share(cells), rank.file(path)
    say_so = f"{experiment.name}: another run is measuring it; waiting for its end"
    with records.exclusive(path, waiting=lambda: say(say_so)):
        outcome = _measure_missing(experiment, cells, path, again, merged)
        if again and rank is None and outcome.reason is None:
            _drop_unlisted(cells, path)
        return outcome


def _measure_missing(
    experiment: Experiment, cells: list[Cell], path: Path, again: bool, merged: list[Record]
) -> Outcome:
    """``merged``: rows on record elsewhere; a cell that is done there or in ``path`` is done."""
    digest = machine.digest(experiment.sources)
    todo = cells
    if not again:
        todo = pending(cells, list(records.read(path)), digest)
        todo = pending(todo, merged, digest)
    if not todo:
        return Outcome(skipped=len(cells))

    context = Context(device=experiment.device)
    failed = done = 0
    for cell in track(todo, experiment.name):
        try:
            rows = _measured(experiment, cell, context)
        except UnavailableError as cause:  # it would be the same for every cell: no rows of errors
            return Outcome(done, len(cells) - len(todo), failed, reason=str(cause))
        errors = [r.error for r in rows if r.error]
        for error in errors[:1]:
            say(f"{experiment.name}: {cell}: {error}")
        failed += bool(errors)
        block = machine.provenance(experiment.device) | {"cell": cell.id, "sources": digest}
        rows = [Record.from_json(block | r.to_json()) for r in rows]
        if any(r.cell == cell.id for r in records.read(path)):
            records.replace(path, {cell.id}, rows)
        else:
            records.append(path, rows)
        done += not errors
    return Outcome(len(todo) - failed, len(cells) - len(todo), failed)


def _drop_unlisted(cells: list[Cell], path: Path) -> None:
    """Remove rows of cells that the experiment had once and lists no more: a figure would draw
    them beside the new ones, as if they were of the same code."""
    listed = {cell.id for cell in cells}
    stale = {r.cell for r in records.read(path) if r.cell is not None} - listed
    if stale:
        say(f"{path.stem}: {len(stale)} cells are not of the experiment any more; removed")
        records.replace(path, stale, [])


def pending(cells: Sequence[Cell], known: Sequence[Record], digest: str) -> list[Cell]:
    """The cells that have no good row from this code yet; an id given twice is a ValueError."""
    _require_distinct(cells)
    bad = {r.cell for r in known if r.error is not None}
    good = {r.cell for r in known if r.error is None and r.sources in (None, digest)} - bad
    return [cell for cell in cells if cell.id not in good]


def _require_distinct(cells: Sequence[Cell]) -> None:
    ids = [cell.id for cell in cells]
    twice = sorted({str(cell) for cell in cells if ids.count(cell.id) > 1})
    if twice:
        raise ValueError(f"cells listed twice: {twice}")


def _measured(experiment: Experiment, cell: Cell, context: Context) -> list[Record]:
    """The cell's rows; a failure becomes one row with the error's first line."""
    try:
        rows = experiment.measured(cell, context)
        if not rows:
            raise RuntimeError("the measurement returned no rows")
        for row in rows:
            if row.source != "measured" or row.experiment != experiment.name:
                raise RuntimeError(f"not a measured row of {experiment.name}: {row.to_json()}")
        return rows
    except UnavailableError:
        raise
    except Exception as error:  # any failure of a cell is data; KeyboardInterrupt passes
        first = (str(error).strip() or "no message").splitlines()[0]
        failure = {"metric": "run", "source": "measured", "experiment": experiment.name}
        defaults = {"implementation": str(cell.get("implementation", "-"))}
        return [records.record(defaults | cell, **failure, error=f"{type(error).__name__}: {first}")]
