"""Torch's own kernels for fp16 tensors: scaling, product, dropout's backward, softmax, layer norm.

Each runs on NumPy arrays of its kind and changes the last arguments in place. Grids are those that
torch launches (``CUDALoops.cuh``, ``PersistentSoftmax.cuh``, ``layer_norm_kernel.cu``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.machine import Counts, Struct
from repro.shipped.library import Found, find

#: Threads of a block; elements of a thread where two and where more bytes go in and out.
THREADS, ELEMENTS = 128, 8
_HALF = "N3c104Half"
_ON_HALVES = rf"{_HALF}ES4_S4_NS0_15binary_internal10MulFunctorIfEEEESt5arrayIPcLm"


def _patterns(architecture: int) -> dict[str, str]:
    vector = 8 if architecture >= 90 else 4  # 16 bytes at a time from Hopper on
    elementwise = rf"vectorized_elementwise_kernelILi{vector}E"
    return {
        "scale": rf"{elementwise}NS0_13AUnaryFunctorI{_ON_HALVES}2E",
        "product": rf"{elementwise}NS0_13BinaryFunctorI{_ON_HALVES}3E",
        "masked scale": rf"{elementwise}ZNS0_43_GLOBAL__N__\w*masked_scale_kernelIb{_HALF}Ef",
        "softmax": rf"softmax_warp_forwardI{_HALF}ES2_fLi10ELb0ELb0E",
        "softmax backward": rf"softmax_warp_backwardI{_HALF}ES2_fLi10ELb0ELb0E",
        "layer norm": rf"vectorized_layer_norm_kernelI{_HALF}EfLb0E",
    }


KERNELS = tuple(_patterns(90))


def _kernel(name: str, architecture: int) -> Found:
    patterns = _patterns(architecture)
    return find(architecture, list(patterns.values()))[patterns[name]]


def elementwise(name: str, architecture: int, factor: float, *arrays: np.ndarray, **options: Any) -> Counts:
    """``scale``: out = factor x, ``product``: out = x y, ``masked scale``: out = factor x mask.

    Args:
        arrays: out, then what is read; of one size, at multiples of 16 bytes.
        options: of :meth:`kernels.machine.Program.launch`. Errors as it and ``find``.
    """
    program, entry = _kernel(name, architecture)
    functors: dict[str, Any] = {
        "scale": Struct((np.uint32(0), np.float32(factor))),
        "product": np.uint8(0),
        "masked scale": Struct((np.float32(factor), None)),
    }
    out = arrays[0]
    grid = (-(-out.size // (THREADS * ELEMENTS)), 1, 1)
    args = [np.int32(out.size), functors[name], Struct(arrays)]
    return program.launch(entry, grid, THREADS, 0, args, **options)


def softmax(architecture: int, out: np.ndarray, x: np.ndarray, **options: Any) -> Counts:
    """Of the rows of x (rows, columns), with 513 to 1,024 columns. Errors as :func:`elementwise`."""
    program, entry = _kernel("softmax", architecture)
    rows, columns = (np.int32(n) for n in x.shape)
    args = [out, x, rows, columns, columns, None, np.int32(0), np.uint8(0)]
    return program.launch(entry, (-(-x.shape[0] // 4), 1, 1), (32, 4, 1), 0, args, **options)


def softmax_backward(architecture: int, dx: np.ndarray, dout: np.ndarray, out: np.ndarray, **options: Any) -> Counts:
    """dx of rows, of dout ∘ out and out: torch multiplies before. Errors as :func:`elementwise`."""
    program, entry = _kernel("softmax backward", architecture)
    rows, columns = (np.int32(n) for n in out.shape)
    args = [dx, dout, out, rows, columns, columns, None]
    return program.launch(entry, (-(-out.shape[0] // 4), 1, 1), (32, 4, 1), 0, args, **options)


def layer_norm(architecture: int, y: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Counts:
    """Of the rows of x (rows, columns), with epsilon 1e-5. Errors as :func:`elementwise`."""
    program, entry = _kernel("layer norm", architecture)
    statistics = [np.zeros(x.shape[0], np.float32) for _ in range(2)]
    args = [np.int32(x.shape[1]), np.float32(1e-5), x, weight, bias, *statistics, y]
    return program.launch(entry, (x.shape[0], 1, 1), (32, 4, 1), 4 * 3 * 4 // 2, args)
