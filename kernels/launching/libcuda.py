"""The calls of ``kernels.launching.driver`` where cuda.bindings is missing.

Through ctypes, from the driver's own library: every machine that has a GPU has it. A launch costs
a few microseconds more of the host's time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

from kernels.launch import TENSOR_MAP_BYTES

LIBRARY = "libcuda.so.1"
# Values of the driver's enumerations (cuda.h).
DATA_TYPES = {"fp16": 6, "fp32": 7, "bf16": 9}
INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_256B, OUT_OF_BOUNDS_ZERO = 0, 3, 3, 0
PROGRAMMATIC_STREAM_SERIALIZATION = 6
MAP_ALIGNMENT = 64


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: which one, and 64 bytes of value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint64 * 8))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise RuntimeError(f"no driver of NVIDIA's here ({error})") from None


def error_name(code: int) -> str:
    """The driver's name of a result, e.g. CUDA_ERROR_INVALID_VALUE."""
    name = ctypes.c_char_p()
    ask = getattr(_library(), "cuGetErrorName", None)
    if ask is None or ask(code, ctypes.byref(name)) or not name.value:
        return f"CUresult {code}"
    return name.value.decode()


def encode_tiled(pointer: int, dtype: str, sizes: Sequence[int], steps: Sequence[int], box: Sequence[int]) -> bytes:
    """A tensor map's 128 bytes. Arguments as of ``kernels.launching.driver.tensor_map_geometry``.

    ValueError with the driver's word when it refuses.
    """
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % MAP_ALIGNMENT
    rank = len(sizes)
    code = _library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(memory) + start),
        DATA_TYPES[dtype],
        ctypes.c_uint(rank),
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * len(steps))(*steps),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        INTERLEAVE_NONE,
        SWIZZLE_128B,
        L2_PROMOTION_256B,
        OUT_OF_BOUNDS_ZERO,
    )
    if code:
        raise ValueError(error_name(code))
    return memory.raw[start : start + TENSOR_MAP_BYTES]


def queue(
    function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, parameters: int, pdl: bool
) -> Callable[[int], int]:
    """A function of the stream that launches; its result is the driver's, 0 for success."""
    attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    config = _Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), shared_bytes)
    config.attributes, config.count = ctypes.pointer(attribute), int(pdl)
    launch = _library().cuLaunchKernelEx
    handle, where = ctypes.c_void_p(function), ctypes.c_void_p(parameters)

    def run(stream: int) -> int:
        config.stream = stream
        return int(launch(ctypes.byref(config), handle, where, None))

    return run
