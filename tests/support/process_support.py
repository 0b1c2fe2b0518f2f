"""Processes that tests start: who they are, that they go, and what they inherit."""

from __future__ import annotations

import os
import time
from pathlib import Path


def reports_its_id(to: Path) -> str:
    """Python code of a process that writes its id, as a whole, and then sleeps for minutes."""
    draft = f"{to}.draft"
    return (
        f"import os, time; file = open({draft!r}, 'w'); file.write(str(os.getpid())); "
        f"file.close(); os.replace({draft!r}, {str(to)!r}); time.sleep(600)"
    )


def wait_until_gone(process: int, limit_s: float = 120) -> None:
    """AssertionError if it still runs after ``limit_s``, which is against a test without an end."""
    until = time.monotonic() + limit_s
    while _runs(process):
        assert time.monotonic() < until, f"process {process} survived"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # a zombie waits for its new parent to collect it


#: Variables of the Makefile that `make test NAME=value` hands on to the tests.
FROM_MAKE = ("NO_VENV", "VENV", "PYTHON", "WORKERS", "FORMATS", "STYLE", "MARKED", "ARGS", "OUT")


def without_make() -> dict[str, str]:
    """This process's environment without what a make above it has put there."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in FROM_MAKE and not name.startswith(("MAKE", "MFLAGS"))
    }
