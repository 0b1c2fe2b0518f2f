"""Clocks have the machine to themselves; whatever counts or draws may run beside each other.

Make runs several jobs at once. A clock that shares cores with another job measures that too, so
timing takes this lock alone; counting bytes and drawing share it. Between processes of
one checkout only, or with one cache folder where the checkout is read-only or there is none; where
the system has no file locks there is no waiting.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from analysis.files import CACHE_VARIABLE, cache_dir, can_write
from repro.measuring import machine

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


def lock_file() -> Path:
    """The file that is locked."""
    own = machine.ROOT / ".cache"
    return (own if machine.CHECKOUT and can_write(own) else cache_dir()) / "lock"


@contextmanager
def alone() -> Iterator[None]:
    """Wait until nothing else measures or draws, and keep others waiting: for clocks."""
    with _locked(exclusive=True):
        yield


@contextmanager
def beside_others() -> Iterator[None]:
    """Wait until nothing is timed; others may count or draw at the same time."""
    with _locked(exclusive=False):
        yield


@contextmanager
def _locked(exclusive: bool) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    path = lock_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise type(error)(
            f"cannot make {path} ({error.strerror}): set {CACHE_VARIABLE} to a folder of your own"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)  # which releases it; so does the end of the process, however it comes
