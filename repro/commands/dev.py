"""``python -m repro dev``: the authors' tools, each a program of its own module.

A tool reads its own arguments by argparse, since rented machines may lack the packages of this
command line; what stands behind its name is handed on to it as it is.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

#: Tool -> (module with a ``main``, what it does).
TOOLS = {
    "audit": ("kernels.audit", "Compile every kernel; registers, spills, instructions."),
    "check": ("repro.check", "One kernel: compile, run, count, registers and spills."),
    "coverage": ("kernels.coverage", "Write the table of what runs what."),
    "gpu-run": ("repro.gpu.run", "Measure what this GPU can within a budget."),
    "hopper-guard": ("repro.instruments.hopper_guard", "Try every Hopper kernel on this card."),
    "import-results": ("repro.gpu.import_results", "Merge the records of a run elsewhere."),
    "machine-code": ("kernels.machine.page", "Write the table of what is executed."),
    "prebuild": ("kernels.prebuild", "Compile the kernels of a GPU run."),
    "register": ("repro.gpu.register", "Write an experiment's predictions before it is run."),
    "sanitizer": ("repro.instruments.sanitizer", "The kernels under compute-sanitizer."),
    "variants": ("kernels.variants", "Compile the shipped sm_80 kernels; registers, spills."),
    "warm-up": ("repro.instruments.warm_up", "Hold this card under load before it is timed."),
}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The authors' tools: `dev TOOL --help` has the arguments of one.",
)


@app.callback()
def _tools() -> None:
    """A group of its own also while it has one tool."""


def _add(name: str, module: str, text: str) -> None:
    @app.command(
        name,
        help=text,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run(context: typer.Context) -> int | None:
        sys.argv = [f"python -m repro dev {name}", *context.args]
        status = import_module(module).main()
        return status if isinstance(status, int) else None


for _name, (_module, _text) in TOOLS.items():
    _add(_name, _module, _text)
