"""What the GPU tests share: whether there is a GPU, arrays on it, both passes on it."""

from __future__ import annotations

from typing import Any

import numpy as np
from flash_support import Problem, to_bits, to_float

from analysis.shapes import Tile
from kernels import attention
from kernels.launch import Array, contiguous_strides
from kernels.launching.cupy_backend import CupyBackend


def missing_gpu() -> str | None:
    """Why there is no GPU to test on, or None."""
    try:
        CupyBackend()
    except RuntimeError as error:
        return str(error)
    return None


def upload(name: str, bits: np.ndarray, dtype: str) -> Array:
    import cupy

    memory = cupy.asarray(bits)
    return Array(name, memory.data.ptr, bits.shape, contiguous_strides(bits.shape), dtype, "rw", memory)


def download(array: Array) -> np.ndarray:
    import cupy

    return cupy.asnumpy(array.owner)


def execute(p: Problem, algorithm: str, tile: Tile | None, *, pdl: bool = False) -> dict[str, np.ndarray]:
    """Both passes on the GPU; results hold NaN beforehand."""
    backend = CupyBackend()
    arrays = {name: upload(name, to_bits(p.data[name], p.dtype), p.dtype) for name in ("q", "k", "v", "dout")}
    for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        blank = np.full(p.data[like].shape, np.nan)
        arrays[name] = upload(name, to_bits(blank, p.dtype), p.dtype)
    stats: dict[str, Array] = {}
    options: dict[str, Any] = {
        "scale": p.scale,
        "causal": p.causal,
        "window": p.window,
        "sinks": p.sinks,
        "tile": tile,
        "shared_limit_bytes": backend.shared_limit_bytes,
        "pdl": pdl,
    }
    if p.key_mask is not None:
        options["key_mask"] = upload("key_mask", p.key_mask.astype(np.uint8, order="C"), "uint8")
    if p.dropout_p:
        options |= {"dropout_p": p.dropout_p, "seed": p.dropout_seed}
    if p.block_mask is not None:
        mask = p.block_mask.astype(np.uint8, order="C")
        options |= {"block_mask": upload("block_mask", mask, "uint8"), "block_size": p.block_size}
    if p.softcap is not None:
        options["softcap"] = p.softcap
    if p.alibi_slopes is not None:
        slopes = np.ascontiguousarray(p.slopes())
        options["alibi_slopes"] = upload("alibi_slopes", slopes, "fp32")
    inputs = [arrays[name] for name in ("q", "k", "v", "out")]
    gradients = [arrays[name] for name in ("dq", "dk", "dv")]
    attention.forward(backend, algorithm, *inputs, stats, **options)
    if "dlse" in p.data:
        options["dlse"] = upload("dlse", p.data["dlse"].astype(np.float32), "fp32")
    attention.backward(backend, algorithm, *inputs, arrays["dout"], stats, *gradients, **options)
    names = ("out", "dq", "dk", "dv")
    return {name: to_float(download(arrays[name]), p.dtype) for name in names}
