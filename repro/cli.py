"""How the command lines of this project end: an error is one line and a non-zero exit status."""

from __future__ import annotations

import os
import traceback
from typing import Any

from repro.progress import say

#: Set to 1 to see where an error came from.
TRACEBACK_VARIABLE = "REPRO_TRACEBACK"


def run(app: Any) -> int:
    """Run a typer app; returns the exit status."""
    import typer

    try:
        status = app(standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        say("interrupted; run the same command again to go on")
        return 130
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE) == "1":
            traceback.print_exc()
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        say(f"error: {text.strip() or type(error).__name__}")
        return 1
    return status if isinstance(status, int) else 0
