"""Records: one measured, predicted or published number a row, kept as JSON Lines.

``repro.measuring.row`` says what a row holds, ``repro.measuring.row_files`` how a file of rows is
written and read. Here are the folders: files are ``results/<machine>/<experiment>.jsonl``, beside
``results/published`` with the papers' numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.arguments import instance
from repro.measuring import machine
from repro.measuring.row import COUNTS, ENVELOPE, LEVELS, PASSES, SOURCES, SPELLED, Record, Scalar, record, spelled
from repro.measuring.row_files import MIGRATIONS, SCHEMA, append, discard, exclusive, numbered, read, replace, write

if TYPE_CHECKING:
    import pandas

__all__ = [
    "COMMITTED",
    "DELIVERED",
    "ENVELOPE",
    "FOLDER",
    "LEVELS",
    "MIGRATIONS",
    "PASSES",
    "RESERVED",
    "RESULTS",
    "SCHEMA",
    "SOURCES",
    "Record",
    "Scalar",
    "append",
    "discard",
    "exclusive",
    "files",
    "frame",
    "load",
    "machines",
    "numbered",
    "read",
    "record",
    "recorded",
    "replace",
    "require_folder",
    "write",
]

#: Folder with one sub-folder per machine, and one named ``published``. ``REPRO_RESULTS`` moves it,
#: so that a run on a rented machine leaves its records where they can be taken away.
RESULTS = Path(os.environ.get("REPRO_RESULTS") or machine.HOME / "results")


def _delivered() -> Path | None:
    own = machine.ROOT if machine.CHECKOUT else Path(__file__).parents[1]
    place = own / "results"
    return place if place.is_dir() and place.resolve() != RESULTS.resolve() else None


#: The records that the project comes with, where they do not lie in RESULTS: only read. An
#: installed package has them inside.
DELIVERED = _delivered()
#: Where the project's own records lie, and beside them what was read of machine code.
COMMITTED = DELIVERED or RESULTS

#: What a folder under results/ may be called: it becomes a path and a heading.
FOLDER = re.compile(r"[a-z0-9_-][a-z0-9._-]*")
#: Folders of other numbers: what is in them.
RESERVED = {"published": "the papers' numbers", "registered": "predictions made before a run"}


def require_folder(name: str) -> str:
    """The name, if measurements may be written to ``results/<name>``.

    ValueError for one that is a path or has other characters than ``[a-z0-9._-]``, and for the
    folders of other numbers: ``published`` (the papers') and ``registered`` (predictions).
    """
    instance("folder of results", name, str)
    if not FOLDER.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a folder of results: letters a to z, digits, '.', '_' and '-' only")
    if name in RESERVED:
        raise ValueError(f"{name!r} holds {RESERVED[name]}; no results go there")
    return name


def frame(records: Iterable[Record]) -> pandas.DataFrame:
    """One tidy frame, a row per record, always with every known column.

    Columns carry the JSON names (``pass``); fields of ``extra`` become columns of their own.
    """
    import pandas

    rows = [r.to_json() for r in records]
    extra = sorted({k for row in rows for k in row} - SPELLED)
    columns = [spelled(f.name) for f in fields(Record) if f.name != "extra"] + extra
    table = pandas.DataFrame(rows, columns=columns, dtype=object)
    for name in ("value", "dropout", "spread_min", "spread_max", "scale_factor", *COUNTS):
        table[name] = pandas.to_numeric(table[name])
    for name in extra:  # numbers stay numbers, anything else stays as it was written
        if table[name].map(lambda x: isinstance(x, int | float) or x is None).all():
            table[name] = pandas.to_numeric(table[name])
    return table


def machines() -> list[str]:
    """The machines (and ``published``) that there are records of."""
    return sorted({p.name for root in _roots() for p in root.glob("*") if p.is_dir()})


def files(machine: str = "*") -> list[Path]:
    """All record files of a machine, of every one by default; the project's own come last."""
    found = (sorted(root.glob(f"{machine}/*.jsonl")) for root in _roots())
    return [path for paths in found for path in paths]


def recorded(machine: str, experiment: str, root: Path | None = None) -> list[Record]:
    """A machine's rows of an experiment: those under RESULTS, and the project's other cells."""
    found: list[Record] = []
    for place in _roots() if root is None else (root,):
        rows = list(read(place / machine / f"{experiment}.jsonl"))
        if found:
            known = {r.cell for r in found}
            rows = [r for r in rows if r.cell and r.cell not in known]
        found += rows
    return found


def _roots() -> tuple[Path, ...]:
    return (RESULTS,) if DELIVERED is None else (RESULTS, DELIVERED)


def load(experiments: Sequence[str], root: Path | None = None, *, local: bool = True) -> list[Record]:
    """Everything on record for these experiments, from all machines and papers.

    ``results/local`` holds what this very machine measured with the host backend and on its CPU,
    ``results/host`` the same cells as committed by the authors: where both have a cell, the local
    one is used. ``local=False`` leaves this machine out: committed records only. Each row gets
    ``machine``, the folder's name.
    """
    here = machines() if root is None else sorted(p.name for p in root.glob("*") if p.is_dir())
    found: list[Record] = []
    for name in experiments:
        local_rows = recorded("local", name, root) if local else ()
        mine = {r.cell for r in local_rows if r.cell and r.error is None}
        for folder in here:
            if folder == "local" and not local:
                continue
            for r in recorded(folder, name, root):
                if folder == "host" and r.cell in mine:
                    continue
                if folder == "local" and r.cell and r.cell not in mine:
                    continue  # failed here; the authors' row, if any, stands
                found.append(Record.from_json(r.to_json() | {"machine": folder}))
    return found
