"""What every attention driver refuses before it launches anything."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kernels.flash_config import DTYPE_CODE, padded_head_dim
from kernels.launch import Array

FP32_MAX = (2 - 2**-23) * 2.0**127
INT32_MAX = 2**31 - 1


def single(name: str, value: float) -> float:
    """A number that fp32 can hold, as float."""
    if not abs(value) <= FP32_MAX:  # also true for NaN
        raise ValueError(f"{name}={value} is beyond {FP32_MAX:.4g}, the most of fp32")
    return float(value)


def require_int32(name: str, shape: tuple[int, ...]) -> None:
    """Kernels count rows and columns in 32 bits."""
    if max(shape, default=0) > INT32_MAX:
        raise ValueError(f"{name} has shape {shape}, above {INT32_MAX} in one dimension")


def finite(scale: float) -> float:
    """The scale as a Python float. ValueError unless it is finite, times log2(e) in fp32 too."""
    scale = float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} is not finite")
    if abs(scale) * math.log2(math.e) > FP32_MAX:
        raise ValueError(f"scale={scale} times log2(e) is above {FP32_MAX:.4g}, the most of fp32")
    return scale


def check_shapes(
    q: Array,
    k: Array,
    v: Array,
    like_q: Mapping[str, Array],
    like_k: Mapping[str, Array],
    rows: Mapping[str, Array],
    key_mask: Array | None,
    kv_dtype: str | None = None,
) -> None:
    """Raise ValueError or TypeError for what the kernels would misread, naming both values.

    kv_dtype: of k and v, by default that of q.
    """
    if len(q.shape) != 4 or len(k.shape) != 4:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}, not (B, H, N, D)")
    require_int32("q", q.shape)
    require_int32("k", k.shape)
    batch, heads, _, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    padded_head_dim(head_dim)
    if k.shape != (batch, kv_heads, seqlen_k, head_dim):
        raise ValueError(f"q has shape {q.shape} but k {k.shape}")
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}")
    expected = {"q": (q, q.shape), "k": (k, k.shape), "v": (v, k.shape)}
    expected |= {name: (array, q.shape) for name, array in like_q.items()}
    expected |= {name: (array, k.shape) for name, array in like_k.items()}
    for name, (array, shape) in expected.items():
        if kv_dtype is not None and name in ("k", "v"):
            if array.dtype != kv_dtype:
                raise TypeError(f"{name} has dtype {array.dtype}, not {kv_dtype}")
        elif array.dtype != q.dtype or array.dtype not in DTYPE_CODE:
            raise TypeError(f"{name} has dtype {array.dtype}, q {q.dtype}")
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")
        check_alignment(name, array)
    for name, array in rows.items():
        if array.dtype != "fp32" or array.shape != q.shape[:3]:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, not fp32 {q.shape[:3]}")
    if key_mask is not None:
        dense = (seqlen_k, 1)
        if key_mask.dtype != "uint8" or key_mask.shape != (batch, seqlen_k):
            raise ValueError(f"key_mask is {key_mask.dtype} {key_mask.shape}, not uint8 {(batch, seqlen_k)}")
        if batch > 1 and key_mask.strides != dense:
            raise ValueError(f"key_mask has strides {key_mask.strides}, not {dense}")


def check_alignment(name: str, array: Array) -> None:
    """Rows are moved 16 bytes at a time."""
    strides = [s for n, s in zip(array.shape[:3], array.strides[:3], strict=True) if n > 1]
    if array.size and (array.pointer % 16 or any(stride * array.itemsize % 16 for stride in strides)):
        raise ValueError(
            f"{name} is not aligned to 16 bytes: address {array.pointer:#x}, strides "
            f"{array.strides} of {array.itemsize} bytes; copy it first"
        )
