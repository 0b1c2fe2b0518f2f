"""The link between a device's memory and a second pool, and that pool.

One interface, three links, so that the same offload executor runs everywhere:

* :class:`CudaLink`: one copy stream a direction, pinned host buffers, events instead of waiting;
* :class:`HostLink`: one worker thread a direction on the CPU, optionally paced to a bandwidth. It
  is an emulated link: both pools are host memory, the bytes and the overlap are real;
* :class:`DirectLink`: copies in the caller's thread; the simplest one, for tests of values.

Every link counts the bytes and copies it moved in each direction.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from analysis.arguments import byte_count, flag, instance, real


class Ticket(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Make whatever the caller launches next run after the copy."""

    def done(self) -> bool:
        """True when the copy is known to have finished."""


class Link(Protocol):
    """Moves bytes between a device tensor and a host tensor: both 1-D uint8 of the same length,
    else TypeError or ValueError (a copy would convert or repeat them in silence)."""

    bytes_out: int
    bytes_in: int

    def send(self, source: Tensor, target: Tensor) -> Ticket:
        """Device to host. The caller keeps ``source`` alive until the ticket is waited for."""

    def fetch(self, source: Tensor, target: Tensor) -> Ticket:
        """Host to device. The caller keeps both alive until the ticket is waited for."""


@dataclass
class Pool:
    """Host buffers that are used again, and counted.

    ``live_bytes`` are handed out now, ``peak_bytes`` their maximum, ``held_bytes`` includes the
    buffers that wait for their next use (pinning is slow, so they are not given back).
    """

    pin: bool = False
    live_bytes: int = 0
    peak_bytes: int = 0
    held_bytes: int = 0
    _free: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _out: dict[int, int] = field(default_factory=dict)  # bytes of what is handed out, by storage

    def __post_init__(self) -> None:
        self.pin = flag("pin", self.pin)

    def take(self, nbytes: int) -> Tensor:
        """A uint8 buffer of exactly ``nbytes``."""
        nbytes = byte_count("nbytes", nbytes)
        free = self._free[nbytes]
        if free:
            buffer = free.pop()
        else:
            buffer = self._allocate(nbytes)
            self.held_bytes += nbytes
        self._out[_storage_of(buffer)] = nbytes
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return buffer

    def _allocate(self, nbytes: int) -> Tensor:
        if self.pin:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        # From NumPy's allocator: on a CPU the two pools stay apart for whoever counts torch's.
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer from :meth:`take`; ValueError for any other, and for one that has been
        given back already."""
        instance("buffer", buffer, Tensor)
        if buffer.dtype != torch.uint8:
            raise TypeError(f"buffer has type {buffer.dtype}, the pool's are torch.uint8")
        if self._out.get(_storage_of(buffer)) != buffer.numel():
            raise ValueError(
                f"buffer of {buffer.numel()} bytes is not one of the {len(self._out)} that this "
                f"pool has handed out, {self.live_bytes} bytes in all"
            )
        del self._out[_storage_of(buffer)]
        self.live_bytes -= buffer.numel()
        self._free[buffer.numel()].append(buffer)


def _storage_of(buffer: Tensor) -> int:
    return buffer.untyped_storage()._cdata


def _check_bytes(source: Tensor, target: Tensor) -> None:
    for name, tensor in (("source", source), ("target", target)):
        instance(name, tensor, Tensor)
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{name} has type {tensor.dtype}; a link moves torch.uint8")
    if source.dim() != 1 or source.shape != target.shape:
        raise ValueError(
            "a link moves from one line of bytes to one as long, got source "
            f"{tuple(source.shape)}, target {tuple(target.shape)}"
        )


class _Done:
    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


@dataclass
class DirectLink:
    """Copies at once, in the caller's thread."""

    bytes_out: int = 0
    bytes_in: int = 0

    def send(self, source: Tensor, target: Tensor) -> Ticket:
        _check_bytes(source, target)
        target.copy_(source)
        self.bytes_out += source.numel()
        return _Done()

    def fetch(self, source: Tensor, target: Tensor) -> Ticket:
        _check_bytes(source, target)
        target.copy_(source)
        self.bytes_in += source.numel()
        return _Done()


class _ThreadTicket:
    def __init__(self) -> None:
        self._event = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._event.set()

    def wait(self) -> None:
        self._event.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._event.is_set()


class _Direction:
    """One worker thread with a first-in first-out queue: a copy engine."""

    def __init__(self, name: str, bytes_per_s: float | None) -> None:
        self.busy_s = 0.0
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._jobs: queue.SimpleQueue[tuple[Callable[[], int], _ThreadTicket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, copy: Callable[[], int]) -> _ThreadTicket:
        ticket = _ThreadTicket()
        self._jobs.put((copy, ticket))
        return ticket

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            copy, ticket = job
            start = max(time.perf_counter(), self._free_at)
            try:
                nbytes = copy()
            except BaseException as error:  # handed to whoever waits for the copy
                ticket.finish(error)
                continue
            if self._bytes_per_s is not None:
                self._free_at = start + nbytes / self._bytes_per_s
                if (left := self._free_at - time.perf_counter()) > 0:
                    time.sleep(left)
            self.busy_s += time.perf_counter() - start
            ticket.finish(None)
            del copy, ticket, job  # the closure holds the source; do not keep it while idle


class HostLink:
    """An emulated full-duplex link on the CPU: one copying thread a direction.

    ``bytes_per_s`` paces each direction (None: as fast as memory allows). Copies and sleeps release
    the interpreter lock, so they overlap with the caller's computation as a copy engine would.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        if bytes_per_s is not None and (bytes_per_s := real("bytes_per_s", bytes_per_s)) <= 0:
            raise ValueError(f"link bandwidth must be positive, got {bytes_per_s} B/s")
        self.bytes_out = 0
        self.bytes_in = 0
        self._out = _Direction("offload-out", bytes_per_s)
        self._in = _Direction("offload-in", bytes_per_s)

    def send(self, source: Tensor, target: Tensor) -> Ticket:
        _check_bytes(source, target)
        self.bytes_out += source.numel()
        return self._out.submit(lambda: _copy(source, target))

    def fetch(self, source: Tensor, target: Tensor) -> Ticket:
        _check_bytes(source, target)
        self.bytes_in += source.numel()
        return self._in.submit(lambda: _copy(source, target))

    @property
    def busy_s(self) -> tuple[float, float]:
        """Seconds each direction spent copying (out, in)."""
        return self._out.busy_s, self._in.busy_s

    def close(self) -> None:
        """Finish what is queued and end the worker threads."""
        self._out.close()
        self._in.close()


def _copy(source: Tensor, target: Tensor) -> int:
    target.copy_(source)
    return source.numel()


class _CudaTicket:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        return self._event.query()


class CudaLink:
    """Copies on two side streams; the compute stream waits for events, so the host need not.

    A copy starts after the work already queued on the compute stream: out, because that work writes
    the source; in, because the target may be memory that this work still reads.

    The compute stream is the current one of ``device``, where the tensors lie (default: the device
    that is current when the link is made), even where another device is current by then.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        if device is not None:
            instance("device", device, torch.device)
            if device.type != "cuda":
                raise ValueError(f"device={str(device)!r} is not a CUDA device")
        self.bytes_out = 0
        self.bytes_in = 0
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)

    def send(self, source: Tensor, target: Tensor) -> Ticket:
        _check_bytes(source, target)
        self.bytes_out += source.numel()
        return self._copy(self._out, source, target)

    def fetch(self, source: Tensor, target: Tensor) -> Ticket:
        _check_bytes(source, target)
        self.bytes_in += source.numel()
        return self._copy(self._in, source, target)

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> Ticket:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _CudaTicket(event, stream.device)
