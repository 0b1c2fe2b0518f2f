"""Launch ``online_softmax.cu``: softmax of rows, and how often each form touches memory.

Milakov & Gimelshein 2018, Algorithms 1 to 4. x and y are contiguous (rows, cols) in fp16, bf16 or
fp32; sums are fp32. Top-k results are values (rows, k) in fp32 and indices (rows, k) in int32.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from analysis.arguments import checked
from kernels.checks import require_int32
from kernels.ladder_arrays import flat_grid
from kernels.launch import DTYPE_CODE, ITEMSIZE, Array, Backend, IoType, Kernel, Size, Word, contiguous_strides

ALGORITHMS = ("naive", "safe", "online")
ACCESSES = {"naive": 3, "safe": 4, "online": 3, "online-topk": 1, "topk": 1}
"""Memory accesses an element: loads of x (or y) and stores of y."""

MAX_K = 32
THREADS = 256
SCRATCH_BYTES = THREADS // 32 * 8  # one pair of 4-byte numbers a warp


@checked
def softmax_kernel(entry: str, dtype: IoType, k: Annotated[int, range(1, MAX_K + 1)] = 1) -> Kernel:
    """One entry point of ``online_softmax.cu``."""
    macros = (("DTYPE", DTYPE_CODE[dtype]), ("THREADS", THREADS), ("TOPK", k))
    return Kernel("beside/online_softmax.cu", entry, macros, THREADS)


def all_kernels(dtype: str, k: int = 5) -> list[Kernel]:
    """Every entry point, for compile tests and ahead-of-time builds."""
    plain = [softmax_kernel(f"softmax_{algorithm}", dtype) for algorithm in ALGORITHMS]
    return [*plain, *(softmax_kernel(entry, dtype, k) for entry in ("softmax_online_topk", "topk"))]


@checked
def predict_bytes(algorithm: str, rows: Size, cols: Size, dtype: IoType, k: Size = 0) -> int:
    """Bytes at the SM boundary: accesses an element times elements, and the top-k answer."""
    if algorithm not in ACCESSES:
        raise ValueError(f"algorithm {algorithm!r} is not one of {', '.join(ACCESSES)}")
    answer = 8 * k * rows if algorithm.endswith("topk") else 0
    return ACCESSES[algorithm] * rows * cols * ITEMSIZE[dtype] + answer


@checked
def softmax(backend: Backend, algorithm: str, x: Array, y: Array, stream: Word | None = None) -> None:
    """y = softmax of every row of x by the "naive", "safe" or "online" algorithm.

    "naive" subtracts no maximum and overflows above x = 88 in fp32. A row of nothing but -inf
    gives 0.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    rows, cols = _require_rows(x)
    _require_like(y, x.shape, x.dtype)
    backend.launch(
        softmax_kernel(f"softmax_{algorithm}", x.dtype),
        flat_grid(rows),
        SCRATCH_BYTES,
        [x.with_access("r"), y.with_access("w"), np.int32(cols)],
        stream,
    )


@checked
def softmax_topk(backend: Backend, x: Array, values: Array, indices: Array, stream: Word | None = None) -> None:
    """The k largest softmax probabilities of every row of x in one pass (Algorithm 4).

    Ordered by probability, equal ones by index. Beyond the end of a short row: 0 and index -1.
    """
    _topk(backend, "softmax_online_topk", x, values, indices, stream)


@checked
def topk(backend: Backend, y: Array, values: Array, indices: Array, stream: Word | None = None) -> None:
    """The k largest elements of every row of y, as a kernel of its own after a softmax."""
    _topk(backend, "topk", y, values, indices, stream)


def _topk(backend: Backend, entry: str, x: Array, values: Array, indices: Array, stream: int | None) -> None:
    rows, cols = _require_rows(x)
    k = values.shape[-1]
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k = {k} is outside 1..{MAX_K}")
    _require_like(values, (rows, k), "fp32")
    _require_like(indices, (rows, k), "int32")
    backend.launch(
        softmax_kernel(entry, x.dtype, k),
        flat_grid(rows),
        SCRATCH_BYTES,
        [x.with_access("r"), values.with_access("w"), indices.with_access("w"), np.int32(cols)],
        stream,
    )


def _require_rows(x: Array) -> tuple[int, int]:
    if len(x.shape) != 2 or min(x.shape) < 1:
        raise ValueError(f"{x.name} {x.shape} must be (rows, cols), neither of them 0")
    require_int32(x.name, x.shape)
    if x.dtype not in DTYPE_CODE:
        raise TypeError(f"{x.name} is {x.dtype}, not one of {', '.join(DTYPE_CODE)}")
    _require_like(x, x.shape, x.dtype)
    return x.shape[0], x.shape[1]


def _require_like(array: Array, shape: tuple[int, ...], dtype: str) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{array.name} is {array.shape} {array.dtype}, not {shape} {dtype}")
    dense = zip(shape, array.strides, contiguous_strides(shape), strict=True)
    if any(size > 1 and stride != wanted for size, stride, wanted in dense):
        raise ValueError(f"{array.name}: strides {array.strides} of shape {shape}, not contiguous")
