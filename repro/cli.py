"""The command lines of this project: see ``kernels.command_line`` for how they end."""

from __future__ import annotations

import sys
from typing import Any

from kernels.command_line import ended, program, show_what_can_be_shown

__all__ = ["program", "run", "show_what_can_be_shown"]


def run(app: Any, name: str | None = None) -> int:
    """Run a typer app, called ``name`` in its help; returns the exit status."""
    import typer

    show_what_can_be_shown()
    try:
        status = app(standalone_mode=False, prog_name=name)
        sys.stdout.flush()
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return ended(KeyboardInterrupt())
    except (Exception, KeyboardInterrupt) as error:
        return ended(error)
    return status if isinstance(status, int) else 0
