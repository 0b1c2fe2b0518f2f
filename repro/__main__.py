"""Command line: ``python -m repro measure [NAME ...]``, ``python -m repro list``.

Figures are drawn by ``python -m figures``.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from repro import cli, experiments, machine
from repro.experiments import run
from repro.progress import say

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def measure(
    names: Annotated[
        list[str] | None, typer.Argument(help="experiments; all of them if none is named")
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(help="folder under results/ (default: local, or the GPU's name)"),
    ] = None,
    again: Annotated[bool, typer.Option(help="also measure what is on record")] = False,
) -> None:
    """Measure experiments on this machine; goes on where an earlier run stopped."""
    chosen = [experiments.experiment(name) for name in names or experiments.names()]
    broken = []
    for one in chosen:
        outcome = run.measure(one, into=into, again=again)
        if outcome.reason:
            say(f"{one.name}: nothing to measure: {outcome.reason}")
            continue
        if outcome.failed:
            say(f"{one.name}: {outcome.failed} cells failed, see their rows")
        if outcome.failed and not outcome.measured + outcome.skipped:
            broken.append(one.name)
    if broken:
        raise ValueError(f"every cell failed of: {', '.join(broken)}")


@app.command("list")
def list_() -> None:
    """List the experiments and whether this machine can measure them."""
    card = machine.gpu()
    print(f"CPU: {machine.cpu()}; GPU: {card.name if card else 'none'}")
    for name in experiments.names():
        one = experiments.experiment(name)
        reason = run.device_reason(one.device)
        what = (
            reason or f"{len(list(one.cells()))} cells on {one.device}, about {one.seconds:.0f} s"
        )
        print(f"{name:24} {one.title} ({what})")


@app.command()
def doctor() -> None:
    """Say what this machine can do, and why not the rest."""
    from repro.doctor import report

    text, complete = report()
    print(text)
    if not complete:
        raise ValueError("something that is needed is missing, see above")


if __name__ == "__main__":
    sys.exit(cli.run(app))
