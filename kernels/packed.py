"""Packed sequences as the sm_80 flash kernels get them (``include/packed.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from analysis.packed import Lengths
from kernels.launch import Argument, Array


@dataclass(frozen=True)
class Packed:
    """Where each sequence starts among all tokens, which lie along the third axis of every array.

    Args:
        cu_seqlens_q, cu_seqlens_k: (sequences + 1) int32, dense.
        lengths: what the tables hold; grids are made from it. The kernels read the tables.
    """

    cu_seqlens_q: Array
    cu_seqlens_k: Array
    lengths: Lengths

    def check(self, q: Array, k: Array) -> None:
        """ValueError or TypeError for what the kernels would misread, naming both values."""
        wanted = (self.lengths.sequences + 1,)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            table = getattr(self, name)
            if table.dtype != "int32":
                raise TypeError(f"{name} has dtype {table.dtype}, not int32")
            if table.shape != wanted:
                raise ValueError(f"{name} has shape {table.shape}, not {wanted}")
        if q.shape[0] != 1:
            raise ValueError(f"packed sequences lie in one item, q has {q.shape[0]}")
        for name, array, total in (("q", q, self.lengths.total_q), ("k", k, self.lengths.total_k)):
            if array.shape[2] != total:
                raise ValueError(f"{name} has {array.shape[2]} rows, its sequences {total} together")

    def refuse(self, **options: Any) -> None:
        """ValueError naming the options that are asked for beside packed sequences."""
        asked = [name for name, value in options.items() if value not in (None, False, "rows")]
        if asked:
            raise ValueError(f"packed sequences (cu_seqlens_q) do not go with {', '.join(asked)}")

    def arguments(self) -> list[Argument]:
        """Of each kernel that works on tiles of sequences, the last ones."""
        return [self.cu_seqlens_q.with_access("r", "cu_seqlens_q"), self.cu_seqlens_k.with_access("r", "cu_seqlens_k")]


def rows_of_all(array: Array) -> Array:
    """The array with stride 0 along its one item, where the kernels number the sequences."""
    return replace(array, strides=(0, *array.strides[1:]))
