"""A process that must not outlive another one: who it is, and that it goes."""

from __future__ import annotations

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
