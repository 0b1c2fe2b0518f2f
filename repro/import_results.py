"""Merge the records of a run elsewhere into ``results/``: ``make import-results FROM=dir``.

``dir`` is what ``make gpu-run OUT=dir`` left, or any folder of ``<machine>/<experiment>.jsonl``. Of
a cell that is on record already, the imported rows win, unless they are failures and the recorded
ones are not. Every file is read and checked before the first is changed.

What ranks wrote (``<experiment>.rank<r>.jsonl``, see ``repro.ranks``) goes into the experiment's
file. With ``FROM=results`` these files are merged where they are, and removed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from repro import cli, ranks, records
from repro.progress import say
from repro.records import Record


@dataclass(frozen=True)
class Imported:
    """What became of one file: rows taken over, rows of cells that were kept as they were."""

    target: Path
    taken: int
    kept: int


def import_results(source: Path, root: Path | None = None) -> list[Imported]:
    """Merge ``source`` into ``root`` (default ``results/``).

    Raises ValueError naming the file for a broken record, a folder without records, or a machine
    folder named ``published``, which nothing measured may overwrite.
    """
    base = source / "records" if (source / "records").is_dir() else source
    root = root or records.RESULTS
    in_place = base.resolve() == root.resolve()
    files = sorted(base.glob("*/*.jsonl"))
    if in_place:
        files = [file for file in files if ranks.merged(file)]
    if not files:
        what = "<experiment>.rank<r>" if in_place else "<experiment>"
        raise ValueError(f"no <machine>/{what}.jsonl in {base}")
    read = {}
    for file in files:
        if file.parent.name == "published":
            raise ValueError(f"{file}: published numbers are not imported")
        read[file] = list(records.read(file))
    done = []
    for file, rows in read.items():
        name = (ranks.merged(file) or file).name
        done.append(_merge(rows, root / file.parent.name / name))
        if in_place:
            file.unlink()
    return done


def _merge(rows: Sequence[Record], target: Path) -> Imported:
    known = list(records.read(target))
    good = _cells(known, failed=False)
    # A failure does not displace a measurement.
    kept = _cells(rows, failed=True) & good
    taken = [r for r in rows if r.cell not in kept and not _recorded_twice(r, known)]
    records.replace(target, {r.cell for r in taken if r.cell}, taken)
    return Imported(target, len(taken), len(rows) - len(taken))


def _cells(rows: Sequence[Record], *, failed: bool) -> set[str]:
    """Cells with a failure among their rows, or cells without any."""
    bad = {r.cell for r in rows if r.cell and r.error is not None}
    return bad if failed else {r.cell for r in rows if r.cell} - bad


def _recorded_twice(row: Record, known: Sequence[Record]) -> bool:
    """Rows without a cell have no identity but themselves."""
    return row.cell is None and row in known


def main(
    source: Annotated[Path, typer.Argument(help="what `make gpu-run OUT=...` left")],
) -> None:
    """Merge the records of a run elsewhere into results/."""
    for done in import_results(source):
        name = f"{done.target.parent.name}/{done.target.name}"
        say(f"{name}: {done.taken} rows imported, {done.kept} kept as recorded")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    sys.exit(cli.run(app))
