"""Peak memory of regions of code, from the allocator itself, on a CPU or a GPU.

    with memory_meter("cpu") as meter:
        with meter.region("step") as step:
            ...
    step.peak_bytes       # most that was live above the start of the region

Regions nest; an inner region hides nothing from the outer one.  Bytes are what was requested:
the rounding of a caching allocator is not in them (`rounded_peak_bytes` has it on a GPU).

On the CPU every allocation and release is read from the profiler's memory trace, temporaries
inside an operation included, so values are there when the meter closes.  Memory that libraries take
without the framework's allocator is not seen, nor is the release of blocks that are older than the
meter: open it before what it shall see freed.  On a GPU the allocator's own counters are read; warm
up first, because matrix libraries keep a workspace after their first product.  Memory of another
array library's pool is not in these counters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler logs its start and its stop

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

_MARK = "memory region "


@dataclass
class Region:
    """Bytes relative to the start of the region; None until the meter knows them."""

    name: str
    peak: int | None = None
    end: int | None = None
    rounded_peak_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The most that was live, above what was live at the start."""
        if self.peak is None:
            raise RuntimeError(f"region {self.name!r} is still being measured")
        return self.peak

    @property
    def end_bytes(self) -> int:
        """What the region left behind (negative: it freed more than it made)."""
        if self.end is None:
            raise RuntimeError(f"region {self.name!r} is still being measured")
        return self.end


class MemoryMeter(Protocol):
    """What both meters offer."""

    def region(self, name: str) -> AbstractContextManager[Region]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def memory_meter(device: torch.device | str) -> MemoryMeter:
    """The meter for a device; ValueError for one that is neither a CPU nor CUDA."""
    kind = torch.device(device).type
    if kind == "cpu":
        return CpuMeter()
    if kind == "cuda":
        return CounterMeter(CudaCounters(torch.device(device)))
    raise ValueError(f"no memory meter for device {device!r}: cpu and cuda have one")


#: The profiler's own entry points; torch's stubs lack the scopes argument and the byte counts.
_PROFILER: Any = torch._C._autograd


class CpuMeter:
    """Regions read from the profiler's trace of the CPU allocator."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._profile: Any = None

    def __enter__(self) -> Self:
        # Allocations and our marks only: a trace of every operation, which is what the profiler's
        # context manager records, takes ten times as long and gigabytes for deep models.
        self._profile = autograd_profiler.profile(profile_memory=True)
        self._profile._prepare_trace()
        scopes = {RecordScope.USER_SCOPE}
        _PROFILER._enable_profiler(self._profile.config(), self._profile.kineto_activities, scopes)
        return self

    @contextmanager
    def region(self, name: str) -> Iterator[Region]:
        region = Region(name)
        self._regions.append(region)
        with record_function(f"{_MARK}{len(self._regions) - 1}"):
            yield region

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        events = _PROFILER._disable_profiler().events()
        self._profile = None
        # (nanoseconds, order at equal times, what): a region opens before and closes after
        # whatever carries the same time stamp.
        timeline: list[tuple[int, int, int, int]] = []
        for event in events:
            name, begin = event.name(), event.start_ns()
            if name == "[memory]":
                timeline.append((begin, 1, -1, event.nbytes()))
            elif name.startswith(_MARK):
                number = int(name.removeprefix(_MARK))
                timeline.append((begin, 0, number, 0))
                timeline.append((begin + event.duration_ns(), 2, number, 0))
        live = 0
        start: dict[int, int] = {}
        peaks: dict[int, int] = {}
        for _, order, number, nbytes in sorted(timeline):
            if order == 0:
                start[number] = peaks[number] = live
            elif order == 1:
                live += nbytes
                for open_region in peaks:
                    peaks[open_region] = max(peaks[open_region], live)
            else:
                region = self._regions[number]
                region.peak = peaks.pop(number) - start[number]
                region.end = live - start[number]


class Counters(Protocol):
    """Allocator counters: bytes live now and the peak since the last reset."""

    def live(self) -> int: ...
    def peak(self) -> int: ...
    def rounded_peak(self) -> int: ...
    def reset_peak(self) -> None: ...


class CudaCounters:
    """The caching allocator's counters of requested bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _stat(self, name: str) -> int:
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.memory_stats(self.device).get(name, 0))

    def live(self) -> int:
        return self._stat("requested_bytes.all.current")

    def peak(self) -> int:
        return self._stat("requested_bytes.all.peak")

    def rounded_peak(self) -> int:
        return self._stat("allocated_bytes.all.peak")

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


class CounterMeter:
    """Regions from counters that know one peak: each reset first hands the peak to outer regions.

    Resetting a peak re-bases it on what is live, so a region starts at its own level even when
    earlier code peaked higher.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._open: list[list[int]] = []  # [peak, rounded peak] of regions around us

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def _hand_out(self) -> None:
        peak, rounded = self._counters.peak(), self._counters.rounded_peak()
        for seen in self._open:
            seen[0], seen[1] = max(seen[0], peak), max(seen[1], rounded)
        self._counters.reset_peak()

    @contextmanager
    def region(self, name: str) -> Iterator[Region]:
        region = Region(name)
        self._hand_out()
        start, rounded_start = self._counters.live(), self._counters.rounded_peak()
        seen = [start, rounded_start]
        self._open.append(seen)
        try:
            yield region
        finally:
            self._hand_out()
            self._open.remove(seen)
            region.peak = seen[0] - start
            region.end = self._counters.live() - start
            region.rounded_peak_bytes = seen[1] - rounded_start


def peak_bytes(step: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Peak of one call of `step` above what is live before it."""
    with memory_meter(device) as meter, meter.region("step") as region:
        step()
    return region.peak_bytes
