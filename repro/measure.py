"""Measure experiments: what ``python -m repro measure`` and ``python -m repro.measure`` do.

The second is the same command without the packages of the command line, for rented machines that
may lack them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from analysis import arguments
from repro import cli, experiments
from repro.experiments import run
from repro.measuring import quiet, ranks, records
from repro.measuring.progress import say


def measure(names: Sequence[str] = (), *, into: str | None = None, again: bool = False, quick: bool = False) -> None:
    """Measure experiments, all of them if none is named; goes on where an earlier run stopped.

    into: folder under results/ (default: local, or the GPU's name);
    again: also measure what is on record;
    quick: leave what is long and on record.

    An experiment named twice is measured once. Under torchrun each process measures its share of
    the cells, on a GPU of its own. ValueError for an unknown name, and at the end where every cell
    of an experiment failed; TypeError for names that are no collection of strings and for switches
    that are not True or False.
    """
    arguments.names("names", names)
    again, quick = arguments.flag("again", again), arguments.flag("quick", quick)
    if into is not None:
        records.require_folder(into)
    rank = ranks.current()
    if rank is not None:
        ranks.take_gpu(rank)
    chosen = [experiments.experiment(name) for name in dict.fromkeys(names) or experiments.names()]
    broken = []
    for one in chosen:
        if into == "host" and one.device == "cuda":
            continue  # that folder is for what needs no GPU
        # Ranks have a GPU each, and share a host that only waits for it.
        quietly = one.needs_quiet and not (rank is not None and one.device == "cuda")
        with quiet.alone() if quietly else quiet.beside_others():
            outcome = run.measure(one, into=into, again=again, quick=quick, rank=rank)
        if outcome.reason:
            say(f"{one.name}: nothing to measure: {outcome.reason}")
            continue
        if outcome.failed:
            say(f"{one.name}: {outcome.failed} cells failed, see their rows")
        if outcome.skipped and not outcome.measured + outcome.failed and not quick:
            say(f"{one.name}: nothing to measure: {outcome.skipped} cells are on record (--again measures them anew)")
        if outcome.failed and not outcome.measured + outcome.skipped:
            broken.append(one.name)
    if broken:
        raise ValueError(f"every cell failed of: {', '.join(broken)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command without typer."""
    parser = argparse.ArgumentParser(prog="python -m repro.measure", description=measure.__doc__)
    parser.add_argument("names", nargs="*", help="experiments; all of them if none is named")
    parser.add_argument("--into", help="folder under results/ (default: local, or the GPU's name)")
    parser.add_argument("--again", action="store_true", help="also measure what is on record")
    parser.add_argument("--quick", action="store_true", help="leave what is long and on record")
    given = parser.parse_args(arguments)
    measure(given.names, into=given.into, again=given.again, quick=given.quick)


if __name__ == "__main__":
    sys.exit(cli.program(main))
