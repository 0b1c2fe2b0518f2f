"""Progress of long work: a live bar on a terminal, plain lines elsewhere or without rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from analysis.files import cache_dir, write_whole

T = TypeVar("T")


def track(items: Sequence[T], what: str, every_s: float = 10.0) -> Iterator[T]:
    """Yield the items and show how far the work is, and what as many took last time.

    On a terminal with rich installed this is a bar; otherwise a line when the work starts, one at
    most every ``every_s`` seconds, and one at the end, on standard error.
    """
    start = time.monotonic()
    before = last_time(what, len(items))
    said = what if before is None else f"{what} ({before:.0f} s last time)"
    yield from _shown(items, said, every_s)
    with suppress(OSError):  # it is for information alone
        write_whole(_kept(what, len(items)), f"{time.monotonic() - start:.1f}".encode())


def last_time(what: str, items: int) -> float | None:
    """Seconds that as many items of this work took on this machine when they were done last."""
    try:
        return float(_kept(what, items).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _kept(what: str, items: int) -> Path:
    return cache_dir() / "durations" / f"{what}-{items}"


def _shown(items: Sequence[T], what: str, every_s: float) -> Iterator[T]:
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
    say(f"{what}: {len(items)} to do")
    for done, item in enumerate(items):
        if time.monotonic() - shown >= every_s:
            shown = time.monotonic()
            say(f"{what}: {done}/{len(items)} after {shown - start:.0f} s")
        yield item
    say(f"{what}: {len(items)}/{len(items)} in {time.monotonic() - start:.1f} s")


@contextmanager
def counter(what: str, every_s: float = 10.0) -> Iterator[Callable[[int, int], None]]:
    """For work that counts itself: a function of what is done and how much there is.

    A bar as of :func:`track`; elsewhere a line at most every ``every_s`` seconds, so that quick
    work says nothing.
    """
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            pass
        else:
            with Progress(console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(what, total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total)
            return
    start = shown = time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown >= every_s:
            shown = time.monotonic()
            say(f"{what}: {done}/{total} after {shown - start:.0f} s")

    yield advance


def say(line: str) -> None:
    """One line on standard error, at once."""
    print(line, file=sys.stderr, flush=True)
