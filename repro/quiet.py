"""Measurements have the machine to themselves; drawings may run beside each other.

Make runs several jobs at once. A measurement that shares cores with another one, or with a drawing,
measures that too, so measuring takes this lock alone and drawing shares it. Between processes of
one checkout only; where the system has no file locks there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from repro.machine import ROOT

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = ROOT / ".cache" / "lock"


@contextmanager
def alone() -> Iterator[None]:
    """Wait until nothing else measures or draws, and keep others waiting."""
    with _locked(exclusive=True):
        yield


@contextmanager
def beside_others() -> Iterator[None]:
    """Wait until nothing measures; others may draw at the same time."""
    with _locked(exclusive=False):
        yield


@contextmanager
def _locked(exclusive: bool) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    LOCK.parent.mkdir(exist_ok=True)
    with open(LOCK, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield  # closing the file releases it, also when the process dies
