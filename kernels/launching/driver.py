"""Calls of NVIDIA's driver beside CuPy's: tensor maps, and launches whose arguments stay packed.

By cuda.bindings, imported when the first call is made, or where it is missing by
``kernels.launching.libcuda``. The driver copies the arguments of a launch before it returns, so
one packed copy serves every call of a kernel: only addresses are written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import numpy as np

from kernels.launch import ITEMSIZE, TENSOR_MAP_BYTES, TENSOR_MAP_ROW_BYTES, Argument, Array, TensorMap, encode
from kernels.launching import libcuda
from kernels.launching.plan import Launch, slot_and_offset

WORD_BYTES = 8
MAP_WORDS = TENSOR_MAP_BYTES // WORD_BYTES
MAPS_KEPT = 1024


@cache
def bindings() -> Any:
    """The module cuda.bindings.driver, or None where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def tensor_map_geometry(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, box_rows: int, longest: int | None = None
) -> tuple[list[int], list[int], list[int]]:
    """Sizes, byte strides of all but the innermost, and box of a (B, H, N, D) array's tensor map.

    Innermost first: 128 bytes of a row, rows, the row's next 128 bytes, heads, batches. N is a
    dimension of its own, so that rows past it read as zero in every head. The stride of a dimension
    of size 1 means nothing, but the driver wants a multiple of 16. longest: of packed sequences,
    whose rows are those of the longest, and whose batches are the rows of the array and its end.
    """
    batch, heads, rows, columns = shape
    chunk = TENSOR_MAP_ROW_BYTES // itemsize
    row_bytes = strides[2] * itemsize if rows > 1 else columns * itemsize
    head_bytes = strides[1] * itemsize if heads > 1 else row_bytes * rows
    batch_bytes = strides[0] * itemsize if batch > 1 else head_bytes * heads
    if longest is not None:
        batch, rows, batch_bytes = rows + 1, longest, row_bytes
    return (
        [chunk, rows, columns // chunk, heads, batch],
        [row_bytes, TENSOR_MAP_ROW_BYTES, head_bytes, batch_bytes],
        [chunk, box_rows, columns // chunk, 1, 1],
    )


# Making a map costs more than launching a kernel; a training loop asks for the same ones again.
@lru_cache(maxsize=4096)
def tensor_map(
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    box_rows: int,
    longest: int | None = None,
) -> np.ndarray:
    """The driver's 128 bytes for :class:`kernels.launch.TensorMap`, as 16 words.

    ValueError when the driver refuses, and where a map of packed sequences, which begins
    ``longest`` rows before the array, would begin below address 0.
    """
    sizes, steps, box = tensor_map_geometry(shape, strides, ITEMSIZE[dtype], box_rows, longest)
    if longest is not None:
        if pointer < longest * steps[0]:
            raise ValueError(
                f"an array at {pointer:#x} has no {longest} rows of {steps[0]} bytes before it, "
                "where a tensor map of packed sequences begins"
            )
        pointer -= longest * steps[0]
    encode_tiled = libcuda.encode_tiled if bindings() is None else _encode_tiled
    try:
        encoded = encode_tiled(pointer, dtype, sizes, steps, box)
    except ValueError as error:
        raise ValueError(
            f"the driver refuses a tensor map of {shape}, strides {strides}, {dtype}, boxes of {box_rows} rows: {error}"
        ) from None
    return np.frombuffer(bytearray(encoded), dtype=np.uint64)


def _encode_tiled(pointer: int, dtype: str, sizes: Sequence[int], steps: Sequence[int], box: Sequence[int]) -> bytes:
    """``libcuda.encode_tiled`` by cuda.bindings."""
    driver = bindings()
    types = driver.CUtensorMapDataType
    kinds = {
        "fp16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }
    error, encoded = driver.cuTensorMapEncodeTiled(
        kinds[dtype],
        len(sizes),
        pointer,
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(n) for n in steps],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(error.name)
    return np.array([int(word) for word in encoded.opaque], dtype=np.uint64).tobytes()


def layout_of(argument: TensorMap) -> tuple[tuple[int, ...], tuple[int, ...], str, int, int | None]:
    """All but the address: the other arguments of :func:`tensor_map`."""
    array = argument.array
    return array.shape, array.strides, array.dtype, argument.box_rows, argument.longest


class PackedLaunch:
    """A kernel, its grid and its packed arguments. Calling it queues one launch on a stream.

    Args:
        name: of the kernel, for messages.
        function: its CUfunction.
        args: the bytes of each argument.
        pdl: with programmatic stream serialisation (dependent launch).
    """

    def __init__(
        self,
        name: str,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        args: Sequence[bytes],
        pdl: bool = False,
    ) -> None:
        self.name = name
        # Every argument begins on a word of its own.
        sizes = [-(-len(arg) // WORD_BYTES) for arg in args]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        packed = np.zeros(max(sum(sizes), 1), np.uint64)
        for start, arg in zip(self.starts, args, strict=True):
            packed.view(np.uint8)[start * WORD_BYTES :][: len(arg)] = np.frombuffer(arg, np.uint8)
        self._packed = packed
        self.words = packed.data
        first = packed.ctypes.data
        self._addresses = np.array([first + WORD_BYTES * s for s in self.starts], np.uintp)
        self._queue = _queue(function, grid, threads, shared_bytes, self._addresses.ctypes.data, pdl)

    def __call__(self, stream: int) -> None:
        """RuntimeError when the driver refuses."""
        error = self._queue(stream)
        if error != 0:
            name = libcuda.error_name(error) if type(error) is int else error.name
            raise RuntimeError(f"{self.name}: the driver refuses the launch: {name}")


def _queue(
    function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, parameters: int, pdl: bool
) -> Callable[[int], Any]:
    """A function of the stream that launches; its result is the driver's, 0 for success."""
    driver = bindings()
    if driver is None:
        return libcuda.queue(function, grid, threads, shared_bytes, parameters, pdl)
    handle = driver.CUfunction(function)
    if not pdl:
        return lambda stream: driver.cuLaunchKernel(handle, *grid, threads, 1, 1, shared_bytes, stream, parameters, 0)[
            0
        ]
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = [attribute], 1

    def queue(stream: int) -> Any:
        config.hStream = driver.CUstream(stream)
        return driver.cuLaunchKernelEx(config, handle, parameters, 0)[0]

    return queue


class PreparedLaunch:
    """A launch of a plan, ready to be queued with the addresses of a call."""

    def __init__(self, launch: Launch, function: int) -> None:
        args = [_without_map(arg) for arg in launch.args]
        kernel = launch.kernel
        self._launch = PackedLaunch(
            kernel.entry, function, launch.grid, kernel.threads, launch.shared_bytes, args, launch.pdl
        )
        places = list(zip(launch.args, self._launch.starts, strict=True))
        self._arrays = [(start, *slot_and_offset(arg.pointer)) for arg, start in places if isinstance(arg, Array)]
        # With the maps made so far: an allocator hands out the same few addresses again and again.
        self._maps: list[tuple[int, int, int, Any, dict[int, memoryview]]] = [
            (start, *slot_and_offset(arg.array.pointer), layout_of(arg), {})
            for arg, start in places
            if isinstance(arg, TensorMap)
        ]
        # Between writing the addresses and the driver's copy of them nobody else may write.
        self._lock = Lock()

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Queue the launch. ``addresses``: of every slot of the plan."""
        with self._lock:
            words = self._launch.words
            for start, slot, offset in self._arrays:
                words[start] = addresses[slot] + offset
            for start, slot, offset, layout, known in self._maps:
                address = addresses[slot] + offset
                if address not in known:
                    if len(known) == MAPS_KEPT:
                        known.clear()
                    known[address] = tensor_map(address, *layout).data
                words[start : start + MAP_WORDS] = known[address]
            self._launch(stream)


def _without_map(arg: Argument) -> bytes:
    """An argument's bytes; a tensor map's are made for each address."""
    return bytes(TENSOR_MAP_BYTES) if isinstance(arg, TensorMap) else encode(arg)
