"""Peak memory of regions of code, from the allocator itself, on a CPU or a GPU.

    with memory_meter("cpu") as meter:
        with meter.region("step") as step:
            ...
    step.peak_bytes       # most that was live above the start of the region

Regions nest; an inner region hides nothing from the outer one.  Bytes are what was requested:
the rounding of a caching allocator is not in them.  On a GPU `rounded_peak_bytes` has it, and
`reserved_peak_bytes` is what the pools held from the driver.

On the CPU every allocation and release is read from the profiler's memory trace, temporaries
inside an operation included, so values are there when the meter closes.  Memory that libraries take
without the framework's allocator is not seen, nor is the release of blocks that are older than the
meter: open it before what it shall see freed.  The profiler is one for the whole process: meters of
other threads wait for this one, a meter inside another shares its trace, and where a profiler is
active already, opening a meter is an error.  On a GPU the counters of torch's allocator and of
CuPy's pool are read and added up (`repro.instruments.pools`); warm up first, because matrix
libraries keep a workspace after their first product.

Python's collector of reference cycles would make bytes depend on when it happens to run.  While a
meter is open it runs where a region begins and ends, nowhere else, and only over what was made
since: so the peak of a region has the cycles that it leaves, its end has not.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch
from torch.profiler import record_function

from analysis.arguments import instance, methods
from repro.checkpointing.allocation_trace import MARK, TRACE, Entry
from repro.instruments.pools import Held, Pool, SteppedPool, TorchPool, cupy_pool


@dataclass
class Region:
    """Bytes relative to the start of the region; None until the meter knows them.

    The last three are of a GPU's pools only: blocks handed out, above those at the start, at the
    peak and at the end; and the most that the pools held from the driver, all of it.
    """

    name: str
    peak: int | None = None
    end: int | None = None
    rounded_peak_bytes: int | None = None
    rounded_end_bytes: int | None = None
    reserved_peak_bytes: int | None = None

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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def memory_meter(device: torch.device | str) -> MemoryMeter:
    """The meter for a device; ValueError for one that is neither a CPU nor CUDA."""
    instance("device", device, str, torch.device)
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device={device!r} is no device that torch knows") from None
    if kind == "cpu":
        return CpuMeter()
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}: no CUDA device was found")
    if kind == "cuda":
        index = torch.device(device).index
        index = torch.cuda.current_device() if index is None else index
        return PoolMeter(TorchPool(index), cupy_pool(index))
    raise ValueError(f"no memory meter for device {device!r}: cpu and cuda have one")


class _Collector:
    """Python's collector of cycles while meters are open; they may nest, and threads may have some
    each."""

    _open = 0
    _lock = threading.Lock()
    _automatic = True

    def __init__(self) -> None:
        self._starts = 0

    def require_open(self, name: str) -> None:
        """RuntimeError for a region of a meter that is not open."""
        if not self._starts:
            raise RuntimeError(f"region {name!r} of a memory meter that is not open: `with` holds it open")

    def start(self) -> None:
        self._starts += 1
        with _Collector._lock:
            if not _Collector._open:
                _Collector._automatic = gc.isenabled()
                gc.disable()
                gc.freeze()
            _Collector._open += 1

    def run(self) -> None:
        """Collect the cycles left since the last run, which is quick; older objects stay."""
        gc.collect()
        gc.freeze()

    def stop(self) -> None:
        self._starts -= 1
        with _Collector._lock:
            _Collector._open -= 1
            if not _Collector._open:
                gc.unfreeze()
                if _Collector._automatic:
                    gc.enable()


_numbers = itertools.count()


class CpuMeter:
    """Regions read from the profiler's trace of the CPU allocator."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self._collector = _Collector()
        self.entries: list[Entry] = []

    def __enter__(self) -> Self:
        TRACE.open(self)
        self._collector.start()
        return self

    @contextmanager
    def region(self, name: str) -> Iterator[Region]:
        instance("name", name, str)
        self._collector.require_open(name)
        region = Region(name)
        number = next(_numbers)
        self._regions[number] = region
        self._collector.run()
        with record_function(f"{MARK}begin {number}"):
            pass
        try:
            yield region
        finally:
            self._collector.run()
            with record_function(f"{MARK}end {number}"):
                pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._collector.stop()
        TRACE.close(self)
        live = 0
        blocks: dict[int, int] = {}  # bytes by address
        start: dict[int, int] = {}
        peaks: dict[int, int] = {}
        for what, number, nbytes in self.entries:
            if what == "block":
                # The trace also has releases of blocks that an earlier trace saw allocated.  They
                # are not in `blocks`.  An address that is there already was freed out of sight.
                live -= blocks.pop(number, 0)
                if nbytes > 0:
                    blocks[number] = nbytes
                    live += nbytes
                    for open_region in peaks:
                        peaks[open_region] = max(peaks[open_region], live)
            elif number not in self._regions:
                continue  # of another meter
            elif what == "begin":
                start[number] = peaks[number] = live
            else:
                region = self._regions[number]
                region.peak = peaks.pop(number) - start[number]
                region.end = live - start[number]
        self.entries = []


class PoolMeter:
    """Regions from a pool that knows one peak, and a second one that knows none.

    Resetting a peak re-bases it on what is live, so a region starts at its own level even when
    earlier code peaked higher. Each reset first hands the peak to all regions that are open.
    """

    def __init__(self, pool: Pool, second: SteppedPool | None = None) -> None:
        self._pool, self._second = pool, second
        self._beside = Held()  # what the second pool holds since the last reset, at most
        self._open: list[list[Held]] = []  # one peak for each region around us
        self._collector = _Collector()

    def __enter__(self) -> Self:
        if self._second is not None:
            self._second.watch(self._hand_out)
        self._collector.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._collector.stop()
        if self._second is not None:
            self._second.unwatch()

    def _hand_out(self) -> None:
        """Close an interval: its peak goes to every open region, the next starts at what is live.

        The second pool ends an interval before and after it grows, so within one it only shrinks.
        """
        second = self._second.live() if self._second is not None else Held()
        peak = self._pool.peak() + self._beside.most(second)
        for seen in self._open:
            seen[0] = seen[0].most(peak)
        self._beside = second
        self._pool.reset_peak()

    def _live(self) -> Held:
        second = self._second.live() if self._second is not None else Held()
        return self._pool.live() + second

    @contextmanager
    def region(self, name: str) -> Iterator[Region]:
        instance("name", name, str)
        self._collector.require_open(name)
        region = Region(name)
        self._collector.run()
        self._hand_out()
        start = self._live()
        seen = [start]
        self._open.append(seen)
        try:
            yield region
        finally:
            self._collector.run()
            self._hand_out()
            self._open.remove(seen)
            end, peak = self._live(), seen[0]
            region.peak = peak.requested - start.requested
            region.end = end.requested - start.requested
            region.rounded_peak_bytes = peak.rounded - start.rounded
            region.rounded_end_bytes = end.rounded - start.rounded
            region.reserved_peak_bytes = peak.reserved


def peak_bytes(step: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Peak of one call of `step` above what is live before it."""
    methods("step", step, "__call__")
    with memory_meter(device) as meter, meter.region("step") as region:
        step()
    return region.peak_bytes
