"""Launches of the Hopper kernels on packed sequences (``include/packed_sm90.cuh``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from analysis.l2.attention import heads_per_group
from kernels.hopper_forms import ForwardForm
from kernels.launch import Array, Backend, TensorMap
from kernels.packed import Packed


def forward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    packed: Packed,
    form: ForwardForm,
    scale: float,
    causal: bool,
    stream: int | None,
    pdl: bool,
) -> None:
    """out and lse; arrays whose shapes fit together, q (1, H, total, D).

    Raises ValueError or TypeError, before the launch, for tables that do not fit the arrays and for
    a form of another head dimension or of no packed sequences.
    """
    packed.check(q, k)
    heads, head_dim = q.shape[1], q.shape[3]
    if form.head_dim != head_dim or not form.packed:
        raise ValueError(f"form {form.name} for packed sequences with head_dim {head_dim}")
    lengths = packed.lengths
    if q.size == 0:
        return
    numbers = lengths.numbered_tiles(form.tile.block_m)
    counter = backend.empty("tile_counter", (1,), "int32")
    reset = form.kernel(q.dtype, causal, "clear_counter")
    backend.launch(reset, (1, 1, 1), 0, [counter.with_access("w")], stream)
    args = [
        TensorMap(q.with_access("r", "q"), 64, lengths.longest_q),
        TensorMap(k.with_access("r", "k"), form.block_n, lengths.longest_k),
        TensorMap(v.with_access("r", "v"), form.block_n, lengths.longest_k),
        TensorMap(out.with_access("w", "out"), 64, lengths.longest_q),
        _rows_of_items(lse.with_access("w", "lse")),
        np.int32(lengths.sequences),
        np.int32(heads),
        np.int32(heads // k.shape[1]),
        np.int32(lengths.longest_q),
        np.int32(lengths.longest_k),
        np.float32(scale),
        np.int32(side_by_side(heads, lengths.longest_k, head_dim * k.itemsize)),
        counter.with_access("atomic"),
        *packed.arguments(),
        np.int32(numbers),
    ]
    blocks = min(numbers * heads, backend.multiprocessors)
    kernel = form.kernel(q.dtype, causal)
    backend.launch(kernel, (blocks, 1, 1), form.shared_bytes, args, stream, pdl=pdl)


def side_by_side(heads: int, longest_k: int, row_bytes: int) -> int:
    """Heads whose tiles of a sequence run side by side: so many that K and V of the longest fit in
    L2. A power of two, or all ``heads``."""
    return heads_per_group(heads, 2 * longest_k * row_bytes)


def _rows_of_items(rows: Array) -> Array:
    """(1, H, total) as the kernels get it, who count a sequence's rows from where it starts: its
    start is the item, and items are a row apart."""
    return replace(rows, strides=(1, *rows.strides[1:]))
