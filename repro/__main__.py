"""Command line: ``python -m repro COMMAND``; after installation also ``recompute-repro COMMAND``.

``predict`` and ``plan`` need formulas only; ``measure`` fills the records, ``explain`` and
``compare`` read them; ``doctor`` says what this machine can do. Figures are drawn by
``python -m figures``.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from repro import cli, experiments, machine
from repro import measure as measuring
from repro.commands import archive, compare, doctor, explain, plan, predict
from repro.experiments import run

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="FlashAttention and gradient checkpointing: predicted, measured, published.",
    epilog="A range such as 512:16384:*2 goes wherever a number goes.",
)
app.command("predict", epilog=predict.EPILOG)(predict.command)
app.command("plan")(plan.command)
app.command("explain")(explain.command)
app.command("compare")(compare.command)
app.command("doctor")(doctor.command)
app.command("archive")(archive.command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"{machine.PROJECT} {machine.project_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


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
    quick: Annotated[bool, typer.Option(help="leave what is long and on record")] = False,
) -> None:
    """Measure experiments on this machine; goes on where an earlier run stopped.

    Under torchrun each process measures its share of the cells, on a GPU of its own.
    """
    measuring.measure(names or (), into=into, again=again, quick=quick)


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


def main() -> int:
    """The installed command."""
    return cli.run(app)


if __name__ == "__main__":
    sys.exit(cli.run(app, "python -m repro"))
