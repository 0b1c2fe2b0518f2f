"""The process's one trace of allocations on the CPU, which every open memory meter shares."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, Protocol

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler logs its start and its stop

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler as autograd_profiler

#: What the name of a mark in the trace begins with.
MARK = "memory region "

#: The profiler's own entry points; torch's stubs lack the scopes argument and the byte counts.
_PROFILER: Any = torch._C._autograd


def require_profiler() -> None:
    """RuntimeError with one line where this torch lacks the entry points for reading the trace."""
    needed = {
        "torch._C._autograd": (_PROFILER, ("_enable_profiler", "_disable_profiler")),
        "torch._C._autograd._ProfilerResult": (
            getattr(_PROFILER, "_ProfilerResult", None),
            ("experimental_event_tree",),
        ),
        "torch.autograd.profiler.profile": (autograd_profiler.profile, ("_prepare_trace", "config")),
    }
    absent = [
        f"{where}.{name}" for where, (holder, names) in needed.items() for name in names if not hasattr(holder, name)
    ]
    if absent:
        raise RuntimeError(
            f"peak memory on the CPU cannot be read: torch {torch.__version__} has no "
            f"{', '.join(absent)} (private names; torch 2.13 has them)"
        )


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    """A trace's events in order; what happens inside a region are its children."""
    for event in events:
        yield event
        yield from _flat(event.children)


#: One block made or released, or a region's begin or end: (kind, address or region, bytes).
Entry = tuple[str, int, int]


class Reader(Protocol):
    """A meter that is open: what has happened since it opened is added to its entries."""

    entries: list[Entry]


class Trace:
    """The process's one trace of allocations.  A meter that opens inside another ends the piece of
    trace so far and begins the next, so that both can read what happened once they need it."""

    #: Seconds that a thread waits for the meter of another one.
    WAIT_S = 600.0

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._meters: list[Reader] = []
        self._profile: Any = None

    def open(self, meter: Reader) -> None:
        """RuntimeError where another profiler is active, or another thread keeps its meter open."""
        require_profiler()
        if not self._lock.acquire(timeout=self.WAIT_S):
            raise RuntimeError(
                f"a memory meter has been open in another thread for {self.WAIT_S:.0f} s: the "
                "profiler behind it is one for the whole process, so close that one first"
            )
        try:
            if self._meters:
                self._stop()
                meter.entries = list(self._meters[-1].entries)  # blocks that may be freed inside
            elif autograd_profiler._is_profiler_enabled or _PROFILER._profiler_enabled():
                raise RuntimeError(
                    "a profiler (torch.profiler or torch.autograd.profiler) is active, and peak "
                    "memory on the CPU is read by the same one: call plan(), profile() or a memory "
                    "meter outside of its context"
                )
            self._start()
        except BaseException:
            self._lock.release()
            raise
        self._meters.append(meter)

    def close(self, meter: Reader) -> None:
        try:
            self._stop()
            self._meters.remove(meter)
            if self._meters:
                self._start()
        finally:
            self._lock.release()

    def _start(self) -> None:
        # Allocations and our marks only: a trace of every operation, which is what the profiler's
        # context manager records, takes ten times as long and gigabytes for deep models.
        self._profile = autograd_profiler.profile(profile_memory=True)
        self._profile._prepare_trace()
        scopes = {RecordScope.USER_SCOPE}
        _PROFILER._enable_profiler(self._profile.config(), self._profile.kineto_activities, scopes)

    def _stop(self) -> None:
        tree = _PROFILER._disable_profiler().experimental_event_tree()
        self._profile = None
        timeline: list[tuple[int, int, Entry]] = []
        for event in _flat(tree):
            name, begin = event.name, event.start_time_ns
            if name == "[memory]":
                block = event.extra_fields
                timeline.append((begin, 1, ("block", block.ptr, block.alloc_size)))
            elif name.startswith(MARK):
                kind, number = name.removeprefix(MARK).split()
                # It opens before and closes after whatever carries the same time stamp.
                timeline.append((begin, 0 if kind == "begin" else 2, (kind, int(number), 0)))
        timeline.sort(key=itemgetter(0, 1))  # stable: a block is made before it is released
        for meter in self._meters:
            meter.entries += [entry for _, _, entry in timeline]


TRACE = Trace()
