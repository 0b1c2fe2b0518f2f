"""``python -m repro measure`` and ``list``: the experiments, run and named."""

from __future__ import annotations

from typing import Annotated

import typer

from repro import experiments
from repro import measure as measuring
from repro.experiments import run
from repro.measuring import machine


def measure(
    names: Annotated[list[str] | None, typer.Argument(help="experiments; all of them if none is named")] = None,
    into: Annotated[str | None, typer.Option(help="folder under results/ (default: local, or the GPU's name)")] = None,
    again: Annotated[bool, typer.Option(help="also measure what is on record")] = False,
    quick: Annotated[bool, typer.Option(help="leave what is long and on record")] = False,
) -> None:
    """Measure experiments on this machine; goes on where an earlier run stopped.

    Under torchrun each process measures its share of the cells, on a GPU of its own.
    """
    measuring.measure(names or (), into=into, again=again, quick=quick)


def list_() -> None:
    """List the experiments and whether this machine can measure them."""
    card = machine.gpu()
    print(f"CPU: {machine.cpu()}; GPU: {card.name if card else 'none'}")
    for name in experiments.names():
        one = experiments.experiment(name)
        reason = run.device_reason(one.device)
        what = reason or f"{len(list(one.cells()))} cells on {one.device}, about {one.seconds:.0f} s"
        print(f"{name:24} {experiments.title(name)} ({what})")
