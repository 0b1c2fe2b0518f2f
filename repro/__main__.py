"""Command line: ``python -m repro COMMAND``; after installation also ``recompute-repro COMMAND``.

``predict`` and ``plan`` need formulas only; ``measure`` fills the records, ``explain`` and
``compare`` read them; ``doctor`` says what this machine can do. Figures are drawn by
``python -m figures``.

A command's module is imported when it is called: the list of commands needs none of them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from repro import cli

#: Command -> (module, function, what it does: the first line of the function's docstring).
COMMANDS = {
    "predict": ("predict", "command", "Predict FLOPs, bytes at both levels, memory and a time bound."),
    "decode": (
        "decode",
        "command",
        "Predict a step of decoding: the cache, bytes by tensor, splits, a time bound, one layer or a whole model.",
    ),
    "plan": ("plan", "command", "Plan the recomputation of a model: schedule, predicted peak and overhead, trade-off."),
    "explain": (
        "explain",
        "command",
        "Explain one cell: predicted, measured, published, and where the difference comes from.",
    ),
    "judge": (
        "judge",
        "command",
        "Judge a claim: its verdict, each number with its range, and where each was measured.",
    ),
    "compare": (
        "compare",
        "command",
        "Compare two machines' records: ratio second / first, with the range its spreads allow.",
    ),
    "cubin": ("cubin", "command", "Say what a compiled kernel file holds: entries, registers, instructions."),
    "doctor": ("doctor", "command", 'Say what this machine can do; for each "no", the cause and a cure.'),
    "archive": (
        "archive",
        "command",
        "Pack records, figures, tables, sources, environment and commit, with checksums.",
    ),
    "measure": ("measuring", "measure", "Measure experiments on this machine; goes on where an earlier run stopped."),
    "list": ("measuring", "list_", "List the experiments and whether this machine can measure them."),
    "dev": ("dev", "app", "The authors' tools: `dev TOOL --help` has the arguments of one."),
}


class _Commands(TyperGroup):
    """The commands above, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"repro.commands.{COMMANDS[cmd_name][0]}")
        found = getattr(module, COMMANDS[cmd_name][1])
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        register = one.command(cmd_name, epilog=getattr(module, "EPILOG", None))
        register(found)
        return typer.main.get_command(one)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="FlashAttention and gradient checkpointing: predicted, measured, published.",
    epilog="A range such as 512:16384:*2 goes wherever a number goes.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from repro.measuring import machine

        print(f"{machine.PROJECT} {machine.project_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def main() -> int:
    """The installed command."""
    return cli.run(app)


if __name__ == "__main__":
    sys.exit(cli.run(app, "python -m repro"))
