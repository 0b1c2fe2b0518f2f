"""Who runs the kernels for a device: CuPy's launcher for CUDA tensors, the host backend for others.

Work is queued on torch's current stream. Scratch memory comes from torch's allocator on that
stream: no second memory pool has to be told when the stream is done with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.launching.cupy_backend import CupyBackend

from analysis.hardware import A100_80GB
from analysis.sums import copies
from kernels.flash_config import SHARED_LIMIT_BYTES
from kernels.launch import Array, Backend
from kernels.launching.plan import Plan, replay
from repro.attention.views import TORCH_TYPES, array_of

__all__ = ["CHECKS_VARIABLE", "Launcher", "Repeated", "launcher_for", "scratch_bytes"]

#: Set to 1 to run CPU tensors with the host backend's memory and race checks on.
CHECKS_VARIABLE = "REPRO_HOST_CHECKS"
#: Arrays in one piece of scratch start on multiples of this, as the allocator's own do.
SCRATCH_ALIGNMENT = 512


class Launcher:
    """A backend whose scratch is counted and, for CUDA, comes from torch's allocator."""

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self.name = backend.name
        self.multiprocessors = backend.multiprocessors
        self.compute_capability: str | None = getattr(backend, "compute_capability", None)
        self.device = device
        self.scratch_bytes = 0
        self._backend = backend
        self.launch: Callable[..., None] = backend.launch

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """Uninitialised scratch, safe to drop once the launches that use it are queued."""
        if self.device.type == "cpu":
            scratch = self._backend.empty(name, shape, dtype)  # knows what has been written
        else:
            memory = torch.empty(shape, dtype=TORCH_TYPES[dtype], device=self.device)
            scratch = array_of(name, memory)
        self.scratch_bytes += scratch.size * scratch.itemsize
        return scratch


class Repeated:
    """A plan on a device, replayed with new addresses.

    A backend with ``prepare`` encodes the arguments once, here; another goes through the plan each
    time.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device = device
        self._plan = plan
        sizes = [array.size * array.itemsize for array in plan.scratch]
        rounded = [-(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for size in sizes]
        *self._offsets, self._scratch_bytes = accumulate(rounded, initial=0)
        prepare = getattr(backend_of(device), "prepare", None)
        self._queue: Callable[[Sequence[int], int], None] | None = None
        if prepare is not None:
            self._queue = prepare(plan.launches)

    def __call__(self, addresses: list[int]) -> None:
        """Run on the caller's arrays at these addresses, in the order of the plan's slots."""
        global _scratch_bytes
        if self._queue is None:
            with launcher_for(self.device) as launcher:
                replay(self._plan, launcher, addresses, stream_of(self.device))
            return
        with on(self.device):
            if self._offsets:
                memory = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self.device)
                first = memory.data_ptr()
                addresses = addresses + [first + offset for offset in self._offsets]
            self._queue(addresses, stream_of(self.device) or 0)
        _scratch_bytes = self._plan.scratch_bytes


_scratch_bytes = 0


def scratch_bytes() -> int:
    """Bytes of scratch that the latest call took beside its inputs and results."""
    return _scratch_bytes


@contextmanager
def launcher_for(device: torch.device) -> Iterator[Launcher]:
    """The backend for a device, with that device current."""
    global _scratch_bytes
    with on(device):
        launcher = Launcher(backend_of(device), device)
        yield launcher
    _scratch_bytes = launcher.scratch_bytes


def note_copies(device: torch.device, copied: Mapping[tuple[str, str], int]) -> None:
    """Add the bytes of copies to a backend that counts, as a kernel "copy"."""
    counted = getattr(backend_of(device), "traffic", None)
    if not copied or counted is None:
        return
    entries = counted.setdefault(copies.KERNEL, {})
    for key, count in copied.items():
        entries[key] = entries.get(key, 0) + count


def backend_of(device: torch.device) -> Backend:
    """The backend that runs tensors of a device."""
    if device.type == "cpu":
        checks = os.environ.get(CHECKS_VARIABLE, "0") == "1"
        return _host(checks) if _host_is is None else _host_as(checks, _host_is)
    return _cuda(device.index)


_host_is: str | None = None
#: Kernels and tiles are chosen for it as for the host backend.
HOST_GPU = replace(
    A100_80GB, name="host", shared_bytes_per_block=SHARED_LIMIT_BYTES, shared_bytes_per_sm=SHARED_LIMIT_BYTES + 1024
)


@contextmanager
def host_as(compute_capability: str | None) -> Iterator[None]:
    """CPU tensors run the kernels that a card of a compute capability ("90") would get, on a host
    backend of their own; None: as they do anyway."""
    global _host_is
    before, _host_is = _host_is, compute_capability
    try:
        yield
    finally:
        _host_is = before


@cache
def _host_as(checks: bool, compute_capability: str) -> Backend:
    from kernels.host import HostBackend

    class Card(HostBackend):
        """Executes on the host."""

    backend = Card(checks=checks)
    backend.compute_capability = compute_capability  # type: ignore[attr-defined]
    return backend


@cache
def _host(checks: bool) -> Backend:
    from kernels.host import HostBackend

    return HostBackend(checks=checks)


@cache
def _cuda(index: int) -> CupyBackend:
    from kernels.launching.cupy_backend import CupyBackend

    return CupyBackend(index)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device current, at no cost where it is."""
    if device.type == "cpu" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def stream_of(device: torch.device) -> int | None:
    """torch's current stream, as kernels are queued behind the operations before them."""
    if device.type == "cpu":
        return None
    return torch.cuda.current_stream(device).cuda_stream
