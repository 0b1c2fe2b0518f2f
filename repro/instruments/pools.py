"""What the memory pools of a GPU process hold: torch's caching allocator, and CuPy's pool.

Neither library's counters see the other's memory, so a peak is that of the sum. torch keeps a peak;
CuPy keeps none, and calls no hook in threads that did not ask for one (autograd's own). But its
pool grows by allocations only: right after one it is at its highest until the next. So the
allocator is wrapped while a meter is open, and each CuPy allocation ends an interval; to torch's
peak in it belongs what CuPy held at its start. Where CuPy frees within an interval and torch
allocates afterwards, the sum is too high by what was freed; it is never too low.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from analysis.arguments import whole


@dataclass(frozen=True)
class Held:
    """Bytes in three senses, each at least the one before (CuPy counts rounded sizes only).

    requested: what was asked for, the counterpart of a sum of tensors; rounded: the blocks handed
    out for it (multiples of 512 bytes); reserved: what the pool has taken from the driver.
    """

    requested: int = 0
    rounded: int = 0
    reserved: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(self.requested + other.requested, self.rounded + other.rounded, self.reserved + other.reserved)

    def most(self, other: Held) -> Held:
        """The larger of each."""
        return Held(
            max(self.requested, other.requested), max(self.rounded, other.rounded), max(self.reserved, other.reserved)
        )


class Pool(Protocol):
    """A pool with a peak that can be re-based on what is live."""

    def live(self) -> Held: ...
    def peak(self) -> Held: ...
    def reset_peak(self) -> None: ...


class SteppedPool(Protocol):
    """A pool without a peak; it calls a watcher right before and right after it grows."""

    def live(self) -> Held: ...
    def watch(self, around_growth: Callable[[], None]) -> None: ...
    def unwatch(self) -> None: ...


class TorchPool:
    """The caching allocator of one CUDA device, given as its number or as torch names it.

    TypeError or ValueError for anything else, None too: the current device may change.
    """

    def __init__(self, device: Any) -> None:
        import torch

        if not isinstance(device, (str, torch.device)):
            device = whole("device", device, least=0)
        elif torch.device(device).type != "cuda":
            raise ValueError(f"device={str(device)!r} is not a CUDA device")
        self._torch = torch
        self.device = device

    def _held(self, which: str) -> Held:
        stats = self._torch.cuda.memory_stats(self.device)
        return Held(
            *(int(stats.get(f"{sense}_bytes.all.{which}", 0)) for sense in ("requested", "allocated", "reserved"))
        )

    def live(self) -> Held:
        self._torch.cuda.synchronize(self.device)
        return self._held("current")

    def peak(self) -> Held:
        return self._held("peak")

    def reset_peak(self) -> None:
        self._torch.cuda.reset_peak_memory_stats(self.device)


class CupyPool:
    """CuPy's default pool on one device. ``cupy`` is the module (a fake one in tests)."""

    def __init__(self, cupy: Any, device: int = 0) -> None:
        self._cupy, self.device = cupy, whole("device", device, least=0)
        self._before: Any = None

    def live(self) -> Held:
        with self._cupy.cuda.Device(self.device):
            pool = self._cupy.get_default_memory_pool()
            used = int(pool.used_bytes())
            return Held(used, used, int(pool.total_bytes()))

    def watch(self, around_growth: Callable[[], None]) -> None:
        self._before = inner = self._cupy.cuda.get_allocator()

        def allocate(size: int) -> Any:
            around_growth()
            memory = inner(size)
            around_growth()
            return memory

        self._cupy.cuda.set_allocator(allocate)

    def unwatch(self) -> None:
        self._cupy.cuda.set_allocator(self._before)


def cupy_pool(device: int = 0) -> CupyPool | None:
    """CuPy's pool, or None where CuPy is not installed."""
    device = whole("device", device, least=0)
    try:
        import cupy
    except ImportError:
        return None
    return CupyPool(cupy, device)
