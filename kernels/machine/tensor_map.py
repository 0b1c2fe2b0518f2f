"""A tensor map as the executor reads it. A card's own encoding is not public, and no kernel looks
inside: it hands on a pointer. So the layout here is ours (``native/hopper.hpp``)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TENSOR_MAP_BYTES = 128
_MAGIC = 0x70616D726F736E74
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


@dataclass(frozen=True)
class TensorMap:
    """How TMA sees an array, as ``cuTensorMapEncodeTiled`` is told: innermost dimension first.

    Args:
        array: what lies in global memory.
        sizes: elements of up to five dimensions.
        strides: bytes of all dimensions but the innermost.
        box: elements that one copy moves, by dimension.
        swizzle: bytes of the swizzled row, 0, 32, 64 or 128.
        offset: bytes from the array's begin to the element at coordinates 0.

    Raises ValueError for what the hardware cannot take, naming the value.
    """

    array: np.ndarray
    sizes: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        rank = len(self.sizes)
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.strides) != rank - 1:
            raise ValueError(
                f"a tensor map of sizes {tuple(self.sizes)} has box {tuple(self.box)} and strides "
                f"{tuple(self.strides)}: one box size each, one stride fewer, at most five"
            )
        if any(not 1 <= size <= 256 for size in self.box):
            raise ValueError(f"box {tuple(self.box)}: each size is 1 to 256")
        if self.swizzle not in SWIZZLES:
            raise ValueError(f"swizzle={self.swizzle} is none of {tuple(SWIZZLES)}")
        row = self.box[0] * self.array.itemsize
        if row % 16 or (self.swizzle and row > self.swizzle):
            raise ValueError(f"a box row of {row} bytes: a multiple of 16, at most the swizzle's {self.swizzle}")
        if any(stride % 16 for stride in self.strides):
            raise ValueError(f"strides {tuple(self.strides)} must be multiples of 16 bytes")

    def encoded(self, address: int) -> bytes:
        """The 128 bytes, for an array at that address."""
        rank = len(self.sizes)
        form = rank | self.array.itemsize << 8 | SWIZZLES[self.swizzle] << 16
        sizes = [*self.sizes, *(1 for _ in range(5 - rank))]
        strides = [*self.strides, *(0 for _ in range(5 - rank))][:4]
        box = [*self.box, *(1 for _ in range(6 - rank))]
        pairs = [box[k] | box[k + 1] << 32 for k in (0, 2, 4)]
        words = [(address + self.offset) % 2**64, form, *sizes, *strides, *pairs, _MAGIC, 0]
        return struct.pack("<16Q", *words)
