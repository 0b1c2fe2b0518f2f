"""Merge the records of a run elsewhere into ``results/`` and judge them.

    make import-results FROM=dir       (judges the claims too: ``python -m figures import-results``)

``dir`` is what ``make gpu-run OUT=dir`` left, its archive, or any folder of
``<machine>/<experiment>.jsonl``. Of a cell that is on record already, the imported rows win, unless
they are failures and the recorded ones are not. Every file is read and checked before the first is
changed: it came from elsewhere.

What ranks wrote (``<experiment>.rank<r>.jsonl``, see ``repro.measuring.ranks``) goes into the
experiment's file. With ``FROM=results`` these files are merged where they are, and removed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from repro import archive
from repro.gpu.run import ARCHIVE
from repro.measuring import ranks, records
from repro.measuring.progress import say
from repro.measuring.records import Record


@dataclass(frozen=True)
class Imported:
    """What became of one file: rows taken over, rows of cells that were kept as they were."""

    target: Path
    taken: int
    kept: int
    rows: tuple[Record, ...] = ()


def import_results(source: Path, root: Path | None = None) -> list[Imported]:
    """Merge ``source`` into ``root`` (default ``results/``).

    Raises ValueError naming file and line for a row that cannot be right, is not measured or is of
    another experiment than its file, and for a folder without records or with a name that is not a
    machine's (``published`` is none: nothing measured may overwrite the papers' numbers).
    """
    root = root or records.RESULTS
    with _unpacked(source) as base:
        in_place = base.resolve() == root.resolve()
        files = sorted(base.glob("*/*.jsonl"))
        if in_place:
            files = [file for file in files if ranks.merged(file)]
        if not files:
            what = "<experiment>.rank<r>" if in_place else "<experiment>"
            raise ValueError(f"no <machine>/{what}.jsonl in {base}")
        read = {file: _checked(file) for file in files}
        done = []
        for file, rows in read.items():
            done.append(_merge(rows, root / file.parent.name / _experiment_file(file)))
            if in_place:
                file.unlink()
        return done


@contextmanager
def _unpacked(source: Path) -> Iterator[Path]:
    """The folder of machines' folders in what a run left."""
    packed = source / ARCHIVE if source.is_dir() else source
    if packed.is_file():
        with tempfile.TemporaryDirectory() as folder:
            archive.extract(packed, Path(folder))
            yield Path(folder) / "records"
        return
    yield source / "records" if (source / "records").is_dir() else source


def _experiment_file(file: Path) -> str:
    return (ranks.merged(file) or file).name


def _checked(file: Path) -> list[Record]:
    """The rows of a file from elsewhere. ValueError as :func:`import_results`."""
    try:
        records.require_folder(file.parent.name)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if file.is_symlink() or file.parent.is_symlink():
        raise ValueError(f"{file}: a link; records are imported from files")
    name = Path(_experiment_file(file)).stem
    if not records.FOLDER.fullmatch(name):
        raise ValueError(f"{file}: {name!r} cannot be the name of an experiment")
    rows = []
    for line, row in records.numbered(file):
        if row.source != "measured":
            raise ValueError(f"{file}, line {line}: source {row.source!r} is not 'measured'")
        if row.experiment != name:
            raise ValueError(f"{file}, line {line}: experiment {row.experiment!r} is not {name!r}")
        for field, value in row.to_json().items():
            if isinstance(value, str) and not value.isprintable():
                raise ValueError(f"{file}, line {line}: {field}={value!a} has control characters")
        rows.append(row)
    return rows


def _merge(rows: Sequence[Record], target: Path) -> Imported:
    known = list(records.read(target))
    good = _cells(known, failed=False)
    # A failure does not displace a measurement.
    kept = _cells(rows, failed=True) & good
    taken = [r for r in rows if r.cell not in kept and not _recorded_twice(r, known)]
    records.replace(target, {r.cell for r in taken if r.cell}, taken)
    return Imported(target, len(taken), len(rows) - len(taken), tuple(taken))


def _cells(rows: Sequence[Record], *, failed: bool) -> set[str]:
    """Cells with a failure among their rows, or cells without any."""
    bad = {r.cell for r in rows if r.cell and r.error is not None}
    return bad if failed else {r.cell for r in rows if r.cell} - bad


def _recorded_twice(row: Record, known: Sequence[Record]) -> bool:
    """Rows without a cell have no identity but themselves."""
    return row.cell is None and row in known


def report(done: Sequence[Imported]) -> list[str]:
    """What was merged, a line for each file, and what the rows say (``repro.gpu.judgement``)."""
    from repro.gpu import judgement

    lines = [
        f"{one.target.parent.name}/{one.target.name}: {one.taken} rows imported, {one.kept} kept as recorded"
        for one in done
    ]
    by_machine: dict[str, list[Record]] = {}
    for one in done:
        by_machine.setdefault(one.target.parent.name, []).extend(one.rows)
    for name, rows in by_machine.items():
        judged = judgement.judge(rows)
        lines += ["", f"{name}:", *judged] if judged else []
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Merge the records of a run elsewhere into results/ and say what they show."""
    parser = argparse.ArgumentParser(prog="python -m repro dev import-results", description=main.__doc__)
    parser.add_argument("source", type=Path, help="what `make gpu-run OUT=...` left")
    for line in report(import_results(parser.parse_args(arguments).source)):
        say(line)
