"""Values that a shell can complete, the last of a comma-separated list included."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Completer = Callable[[str], list[str]]


def of(values: Sequence[str] | Callable[[], Sequence[str]]) -> Completer:
    """A completer for an option that takes one of ``values`` or a list of them."""

    def complete(incomplete: str) -> list[str]:
        known = values() if callable(values) else values
        before, comma, last = incomplete.rpartition(",")
        start = last.casefold()
        return [before + comma + name for name in known if name.casefold().startswith(start)]

    return complete
