"""Launch kernels on the host: layouts shared with ``runtime.cpp``, errors, counters, scratch."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.host.compiler import HostKernel, load_kernel, runtime_library
from kernels.launch import ITEMSIZE, Argument, Array, Kernel, TensorMap, check_grid, contiguous_strides, encode

ACCESS_CODE = {"r": 0, "w": 1, "rw": 2, "atomic": 3}
DIRECTIONS = ("read", "write", "atomic")
SHARED_LIMIT_BYTES = 227 * 1024  # the most that any supported GPU gives a block (H100)
#: Seconds that a thread may run without coming to a barrier or its end.
LIMIT_S = 60.0


class _TensorArgument(ctypes.Structure):
    _fields_ = (
        ("pointer", ctypes.c_uint64),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
        ("itemsize", ctypes.c_int32),
        ("access", ctypes.c_int32),
        ("parameter", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("initialised", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64 * 3),
    )


class _LaunchArguments(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("runtime_of_kernel", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("tensors", ctypes.c_void_p),
        ("tensor_count", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("os_threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int64),
        ("checks", ctypes.c_int32),
        ("random", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("shared_traffic", ctypes.c_void_p),
        ("limit_s", ctypes.c_double),
    )


class _Failure(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char * 32),
        ("text", ctypes.c_char * 1024),
        ("tensor", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("block", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


class KernelError(RuntimeError):
    """A kernel broke a rule. No memory outside the launch was touched.

    Attributes:
        kind: "out of bounds", "misaligned", "access", "uninitialised", "unwritten", "race",
            "deadlock", "divergence", "limit", "uncounted" (a plain pointer was dereferenced),
            "division" (of an integer by zero), "trap", "endless", "interrupted" or "gone" (the
            memory of a tensor or pointer is: a mapped file that was cut short)
        kernel: entry point.
        tensor: name of the tensor, or None (shared memory, barriers).
        index: element of the tensor's view, or None when the place is outside it.
        offset_bytes: from the start of the tensor or of shared memory.
        block: (x, y, z), or None when no block was at fault.
        thread: index in the block, or None.
    """

    def __init__(
        self,
        message: str,
        kind: str,
        kernel: str,
        tensor: str | None,
        index: tuple[int, ...] | None,
        offset_bytes: int,
        block: tuple[int, int, int] | None,
        thread: int | None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.kernel = kernel
        self.tensor = tensor
        self.index = index
        self.offset_bytes = offset_bytes
        self.block = block
        self.thread = thread


class Scratch:
    """Memory of :meth:`HostBackend.empty`: knows which elements have been written."""

    def __init__(self, elements: int, itemsize: int) -> None:
        memory = np.empty(elements * itemsize + 256, np.uint8)
        start = -memory.ctypes.data % 256  # as aligned as device memory
        self.values = memory[start : start + elements * itemsize]
        self.initialised = np.zeros(elements, np.uint8)
        self.itemsize = itemsize
        self.complete = elements == 0

    def initialised_at(self, array: Array) -> int | None:
        """Address of the flag of the array's element 0, None when there is nothing to check."""
        if not self.complete:
            self.complete = bool(self.initialised.all())
        if self.complete or array.itemsize != self.itemsize:
            return None
        element = (array.pointer - self.values.ctypes.data) // self.itemsize
        return self.initialised.ctypes.data + element


# The runtime's slots and workers belong to the process. A fork waits for the kernel that another
# thread runs: the child would have a lock that nobody releases, and workers in mid-block.
_launching = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_launching.acquire, after_in_parent=_launching.release, after_in_child=_launching.release
    )


def _limit_s() -> float:
    chosen = os.environ.get("REPRO_HOST_LIMIT_S")
    if chosen is None:
        return LIMIT_S
    try:
        limit = float(chosen)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < math.inf:
        raise ValueError(f"REPRO_HOST_LIMIT_S={chosen!r} is not a number of seconds")
    return limit


def _os_threads() -> int:
    chosen = os.environ.get("REPRO_HOST_THREADS")
    if chosen is not None:
        if not chosen.isdecimal() or int(chosen) < 1:
            raise ValueError(f"REPRO_HOST_THREADS={chosen!r} is not a positive number")
        return int(chosen)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class HostBackend:
    """Runs kernels on the CPU, counting every byte and, with ``checks``, judging every access.

    Args:
        checks: see the package docstring for the list. Without them counting is the same, and
            results of a faulty kernel may be anything.
        seed: draw the next thread of a block at random at every switch, reproducibly.
        os_threads: how many blocks run at a time; default ``REPRO_HOST_THREADS`` or one per core.
        limit_s: seconds that a thread may run without coming to a barrier before that is an error;
            default ``REPRO_HOST_LIMIT_S`` or 60; 0: no limit.

    Attributes:
        traffic: kernel entry -> {(tensor, direction): bytes} since :meth:`reset`, without zeros;
            direction is "read", "write" or "atomic".
        shared_traffic: kernel entry -> {"read" or "write": bytes of shared memory}, all threads
        added up, since :meth:`reset`; ldmatrix and products read, copies write. What a
            warpgroup's product reads of its common operand counts once.
    """

    name = "host"
    #: Two of them, so that the blocks of a persistent kernel take several tiles each.
    multiprocessors = 2

    def __init__(
        self, checks: bool = True, seed: int | None = None, os_threads: int | None = None, limit_s: float | None = None
    ) -> None:
        self.checks = checks
        self.seed = seed
        self.limit_s = _limit_s() if limit_s is None else limit_s
        if not 0 <= self.limit_s < math.inf:
            raise ValueError(f"limit_s = {limit_s} is not a number of seconds")
        self.os_threads = _os_threads() if os_threads is None else os_threads
        if self.os_threads < 1:
            raise ValueError(f"os_threads = {self.os_threads} is not a positive number")
        self.traffic: dict[str, dict[tuple[str, str], int]] = {}
        self.shared_traffic: dict[str, dict[str, int]] = {}

    def reset(self) -> None:
        """Forget the traffic counted so far."""
        self.traffic = {}
        self.shared_traffic = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """Uninitialised scratch; reading an element before it was written is an error."""
        if dtype not in ITEMSIZE:
            raise TypeError(f"{name}: dtype {dtype!r} is not one of {list(ITEMSIZE)}")
        elements = int(np.prod(shape, dtype=np.int64))
        scratch = Scratch(elements, ITEMSIZE[dtype])
        return Array(name, scratch.values.ctypes.data, tuple(shape), contiguous_strides(shape), dtype, "rw", scratch)

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[Argument],
        stream: int | None = None,
        pdl: bool = False,
    ) -> None:
        """Run a kernel to its end; ``stream`` and ``pdl`` mean nothing here.

        Raises:
            KernelError: the kernel broke a rule; no argument was changed.
            HostCompileError: it does not compile, or there is no compiler.
            TypeError, ValueError: arguments or grid do not fit the kernel.
        """
        check_grid(kernel, grid)
        if not 0 <= shared_bytes <= SHARED_LIMIT_BYTES:
            raise ValueError(
                f"{kernel.entry}: {shared_bytes} bytes of shared memory a block, the limit is {SHARED_LIMIT_BYTES}"
            )
        loaded = load_kernel(kernel)
        encoded = _encode_all(kernel, loaded, args)
        # A tensor map begins with the address of its array, as a view does.
        views = [arg.array if isinstance(arg, TensorMap) else arg for arg in args]
        arrays = [(i, view) for i, view in enumerate(views) if isinstance(view, Array)]
        tensors = (_TensorArgument * max(len(arrays), 1))()
        for tensor, (position, array) in zip(tensors, arrays, strict=False):
            _describe(tensor, position, array)
        params = (ctypes.c_void_p * max(len(encoded), 1))(*(ctypes.addressof(e) for e in encoded))
        shared_traffic = (ctypes.c_uint64 * 2)()
        request = _LaunchArguments(
            loaded.entry,
            loaded.runtime_slot,
            ctypes.addressof(params),
            ctypes.addressof(tensors),
            len(arrays),
            kernel.threads,
            (ctypes.c_uint32 * 3)(*grid),
            self.os_threads,
            shared_bytes,
            int(self.checks),
            int(self.seed is not None),
            0 if self.seed is None else self.seed,
            ctypes.addressof(shared_traffic),
            self.limit_s,
        )
        failure = _Failure()
        with _launching:
            failed = runtime_library().host_launch(ctypes.byref(request), ctypes.byref(failure))
        if failed:
            raise _error(kernel, grid, [array for _, array in arrays], failure)
        shared = self.shared_traffic.setdefault(kernel.entry, {})
        for direction, count in zip(DIRECTIONS, shared_traffic, strict=False):
            shared[direction] = shared.get(direction, 0) + count
        counted = self.traffic.setdefault(kernel.entry, {})
        for tensor, (_, array) in zip(tensors, arrays, strict=False):
            for direction, count in zip(DIRECTIONS, tensor.bytes, strict=True):
                if count:
                    key = (array.name, direction)
                    counted[key] = counted.get(key, 0) + count


def _encode_all(kernel: Kernel, loaded: HostKernel, args: Sequence[Argument]) -> list[Any]:
    """Arguments as buffers, held against the sizes of the kernel's parameters."""
    if len(args) != len(loaded.parameter_bytes):
        raise TypeError(f"{kernel.entry} takes {len(loaded.parameter_bytes)} arguments, {len(args)} are given")
    buffers = []
    for i, (arg, size) in enumerate(zip(args, loaded.parameter_bytes, strict=True)):
        data = encode(arg)
        if len(data) != size:
            view = arg.array if isinstance(arg, TensorMap) else arg
            what = view.name if isinstance(view, Array) else type(view).__name__
            raise TypeError(
                f"{kernel.entry}: argument {i} ({what}) has {len(data)} bytes, the kernel's parameter {size}"
            )
        # On a multiple of 64 bytes, as tensor maps are declared: wide loads rely on it.
        memory = (ctypes.c_char * (size + 63))()
        buffer = (ctypes.c_char * size).from_buffer(memory, -ctypes.addressof(memory) % 64)
        ctypes.memmove(buffer, data, size)
        buffers.append(buffer)
    return buffers


def _describe(tensor: _TensorArgument, position: int, array: Array) -> None:
    padding = 4 - len(array.shape)
    tensor.pointer = array.pointer
    tensor.shape[:] = [1] * padding + list(array.shape)
    tensor.stride[:] = [0] * padding + list(array.strides)
    tensor.itemsize = array.itemsize
    tensor.access = ACCESS_CODE[array.access]
    tensor.parameter = position
    if isinstance(array.owner, Scratch):
        tensor.initialised = array.owner.initialised_at(array)


def index_of(array: Array, offset_bytes: int) -> tuple[int, ...] | None:
    """Element of a view at a byte offset from element 0, or None when it is not in the view."""
    if offset_bytes < 0 or array.size == 0:
        return None
    rest = offset_bytes // array.itemsize
    index = [0] * len(array.shape)
    for axis in sorted(range(len(array.shape)), key=lambda i: -array.strides[i]):
        if array.strides[axis]:
            index[axis] = min(rest // array.strides[axis], array.shape[axis] - 1)
            rest -= index[axis] * array.strides[axis]
    return tuple(index) if rest == 0 else None


def _error(kernel: Kernel, grid: tuple[int, int, int], arrays: list[Array], failure: _Failure) -> KernelError:
    kind, text = failure.kind.decode(), failure.text.decode()
    tensor = index = block = thread = None
    where = ""
    if failure.tensor >= 0:
        array = arrays[failure.tensor]
        tensor = array.name
        index = index_of(array, failure.offset)
        place = f"offset {failure.offset // array.itemsize} (elements)" if index is None else f"index {index}"
        where = f", tensor {tensor!r} of shape {array.shape}, {place}"
    if failure.block >= 0:
        x, rest = failure.block % grid[0], failure.block // grid[0]
        block = (x, rest % grid[1], rest // grid[1])
        where += f", block {block}"
    if failure.thread >= 0:
        thread = failure.thread
        where += f", thread {thread}"
    return KernelError(
        f"{kernel.entry}: {kind}{where}: {text}", kind, kernel.entry, tensor, index, failure.offset, block, thread
    )
