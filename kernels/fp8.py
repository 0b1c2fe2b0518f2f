"""K and V of e4m3 as the sm_80 forward gets them (``include/fp8_tiles.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.shapes import scale_blocks
from kernels.launch import Argument, Array


@dataclass(frozen=True)
class KeyScales:
    """What the e4m3 numbers of K and V are multiplied with: key j of an item and key/value head
    has the scale of its block, ``k[b, h, j // block]``.

    Args:
        k, v: (B, Hkv, ceil(Nk / block)) fp32, any finite numbers; stride 0 shares them.
        block: keys that share a scale, a multiple of 16; None: all of a head, k and v
            (B, Hkv, 1).
    """

    k: Array
    v: Array
    block: int | None = None

    def check(self, q: Array, k: Array) -> None:
        """ValueError or TypeError for what the kernel would misread, naming both values."""
        if q.dtype == "fp32":
            raise TypeError("K and V of e4m3 are multiplied in 16 bits, q is fp32")
        if q.shape[3] % 16:
            raise ValueError(f"head_dim={q.shape[3]} is not a multiple of 16, as e4m3 rows need")
        batch, kv_heads, keys = k.shape[:3]
        expected = (batch, kv_heads, scale_blocks(keys, self.block))
        for name, scales in (("k_scale", self.k), ("v_scale", self.v)):
            if scales.dtype != "fp32":
                raise TypeError(f"{name} has dtype {scales.dtype}, not fp32")
            if scales.shape != expected:
                raise ValueError(f"{name} has shape {scales.shape}, not (B, Hkv, blocks of keys) = {expected}")

    def arguments(self, k: Array) -> list[Argument]:
        """Of a kernel with FP8 1, after ``scale``."""
        return [
            self.k.with_access("r", "k_scale"),
            self.v.with_access("r", "v_scale"),
            np.int32(k.shape[2] if self.block is None else self.block),
        ]


def key_scales(k_scale: Array | None, v_scale: Array | None, block: int | None) -> KeyScales | None:
    """The two together, None without them; ValueError where one of them is missing."""
    if k_scale is None and v_scale is None:
        if block is not None:
            raise ValueError(f"scale_block={block} without k_scale and v_scale")
        return None
    if k_scale is None or v_scale is None:
        missing = "k_scale" if k_scale is None else "v_scale"
        raise ValueError(f"k_scale and v_scale go together, {missing} is None")
    return KeyScales(k_scale, v_scale, block)
