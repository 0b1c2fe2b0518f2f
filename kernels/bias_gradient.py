"""The gradient of a bias: dS, summed over the dimensions that the bias lacks.

``flash_backward.cu`` makes dS tile by tile and sends it, in one of three forms:

    "write"      the bias has all dimensions: each element has one tile, which writes it in the io
                 type
    "atomic"     heads or items share the bias: fp32 atomic additions, in any order
    "workspace"  the same in a fixed order: all dS in fp32 to memory of B · H · Nq · Nk, added up
                 afterwards
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kernels.flash_config import BIAS_GRADIENTS, DTYPE_CODE
from kernels.launch import Argument, Array, Backend, Kernel

THREADS = 128


def form_of(bias: tuple[int, int], batch_heads: tuple[int, int], deterministic: bool) -> str:
    """One of ``BIAS_GRADIENTS`` for a bias (items, heads, Nq, Nk) of that many items and heads."""
    if bias == batch_heads:
        return "write"
    return "workspace" if deterministic else "atomic"


@dataclass(frozen=True)
class BiasGradient:
    """One gradient on its way: where the main kernel sends it, and the launches around it.

    dbias: (1 or B, 1 or H, Nq, Nk) in the io type.
    accum: fp32, of the shape of dbias ("atomic") or (B, H, Nq, Nk) ("workspace").
    partial: masks leave pairs that no tile visits.
    """

    form: str
    dbias: Array
    accum: Array | None
    partial: bool

    @classmethod
    def start(cls, backend: Backend, dbias: Array, q: Array, *, deterministic: bool, partial: bool) -> BiasGradient:
        """Asks for the memory that the form needs."""
        batch, heads = q.shape[:2]
        form = form_of((dbias.shape[0], dbias.shape[1]), (batch, heads), deterministic)
        accum = None
        if form != "write":
            like = dbias.shape if form == "atomic" else (batch, heads, *dbias.shape[2:])
            accum = backend.empty("dbias_accum", like, "fp32")
        return cls(form, dbias, accum, partial)

    def zero(self, backend: Backend, stream: int | None) -> None:
        """Before the main kernel: where it only adds, or does not come by."""
        if self.form != "atomic" and not self.partial:
            return
        target = self.dbias if self.accum is None else self.accum
        name = "dbias" if self.accum is None else "dbias_accum"
        items, heads, rows, columns = target.shape
        args: list[Argument] = [target.with_access("w", name), np.int32(heads), np.int32(rows), np.int32(columns)]
        kernel = _kernel("flash_bias_zero", target.dtype)
        backend.launch(kernel, (items * heads * rows, 1, 1), 0, args, stream)

    def argument(self) -> Array:
        """Of the main kernel; it is given the index of every item and head."""
        if self.accum is None:
            return self.dbias.with_access("rw" if self.partial else "w", "dbias")
        if self.form == "workspace":
            return self.accum.with_access("rw")
        return shared(self.accum).with_access("atomic")

    def finish(self, backend: Backend, stream: int | None) -> None:
        """After the main kernel: sums, rounded to the io type."""
        if self.accum is None:
            return
        items, heads, rows, columns = self.dbias.shape
        args: list[Argument] = [
            self.accum.with_access("r"),
            self.dbias.with_access("w", "dbias"),
            np.int32(heads),
            np.int32(rows),
            np.int32(columns),
            np.int32(self.accum.shape[0] // items),
            np.int32(self.accum.shape[1] // heads),
        ]
        kernel = _kernel("flash_bias_sum", self.dbias.dtype)
        backend.launch(kernel, (items * heads * rows, 1, 1), 0, args, stream)


def shared(array: Array) -> Array:
    """An array (1 or B, 1 or H, Nq, Nk), every item and head of whose lone ones is the same: the
    kernels' index times stride 0."""
    strides = [s if n > 1 else 0 for n, s in zip(array.shape, array.strides, strict=True)]
    return replace(array, strides=(*strides[:3], 1))


def _kernel(entry: str, dtype: str) -> Kernel:
    macros = (("DTYPE", DTYPE_CODE[dtype]),)
    return Kernel("flash_bias_gradient.cu", entry, macros, THREADS)


__all__ = ["BIAS_GRADIENTS", "BiasGradient", "form_of", "shared"]
