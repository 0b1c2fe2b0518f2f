"""Write the predictions of an experiment before anybody has measured it.

    python -m repro dev register gpu-l2-registered

They go to ``results/registered/NAME.jsonl`` with date and commit. A cell that is registered already
keeps its prediction: only cells that are new are added, so a change of the model cannot make an old
prediction better. The experiment's module has ``registered(cell)``, which yields the rows.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from repro import experiments
from repro.measuring import machine, records
from repro.measuring.cells import Cell
from repro.measuring.records import Record

FOLDER = "registered"


def register(name: str, root: Path | None = None) -> int:
    """Add the experiment's new cells; returns how many. Raises ValueError where it has none to
    give, and where a card has measured a cell of it already."""
    root = root or records.RESULTS
    if not hasattr(experiments.module_of(name), "registered"):
        raise ValueError(f"{name} registers nothing: its module has no registered(cell)")
    measured = {
        row.cell
        for folder in root.glob("*")
        for row in records.read(folder / f"{name}.jsonl")
        if row.source == "measured"
    }
    path = root / FOLDER / f"{name}.jsonl"
    known = {row.cell for row in records.read(path)}
    stamp = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": machine.commit()}
    added = []
    for cell in experiments.experiment(name).cells():
        rows = [] if cell.id in known else predictions(name, cell)
        if rows and cell.id in measured:
            raise ValueError(f"{name}: cell {cell.id} has been measured; it is too late")
        added += [Record.from_json(row.to_json() | stamp) for row in rows]
    records.append(path, added)
    return len(added)


def predictions(name: str, cell: Cell) -> list[Record]:
    """What the models say now of a cell of an experiment that registers."""
    rows = experiments.module_of(name).registered(cell)
    return experiments.experiment(name).records(cell, rows, "predicted")


def main(arguments: list[str] | None = None) -> None:
    """Register one experiment's predictions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", help="the experiment")
    name = parser.parse_args(arguments).name
    print(f"{name}: {register(name)} predictions registered")
