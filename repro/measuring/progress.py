"""Progress of long work: a live bar on a terminal, plain lines elsewhere or without rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], what: str, every_s: float = 10.0) -> Iterator[T]:
    """Yield the items and show how far the work is.

    On a terminal with rich installed this is a bar; otherwise a line when the work starts, one at
    most every ``every_s`` seconds, and one at the end, on standard error.
    """
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track as rich_track
        except ImportError:
            pass
        else:
            console = Console(stderr=True)
            yield from rich_track(items, description=what, console=console, transient=True)
            return
    yield from _plain(items, what, every_s)


def _plain(items: Sequence[T], what: str, every_s: float) -> Iterator[T]:
    start = shown = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - shown >= every_s:
            shown = time.monotonic()
            say(f"{what}: {done}/{len(items)} after {shown - start:.0f} s")
        yield item
    say(f"{what}: {len(items)}/{len(items)} in {time.monotonic() - start:.1f} s")


def say(line: str) -> None:
    """One line on standard error, at once."""
    print(line, file=sys.stderr, flush=True)
