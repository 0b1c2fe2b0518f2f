"""Launches of the Hopper kernels on packed sequences (``include/packed_sm90.cuh``)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from analysis.l2.attention import heads_per_group
from kernels.hopper_forms import SEQUENCE_BYTES, WARPGROUP, BackwardForm, ForwardForm
from kernels.launch import ITEMSIZE, Argument, Array, Backend, Kernel, TensorMap
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


def backward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    packed: Packed,
    form: BackwardForm,
    *,
    scale: float,
    causal: bool,
    dlse: Array | None,
    deterministic: bool,
    stream: int | None,
    pdl: bool,
) -> None:
    """dq, dk, dv; the rest as in :func:`forward`."""
    packed.check(q, k)
    heads, total_q, head_dim = q.shape[1:]
    kv_heads, lengths = k.shape[1], packed.lengths
    if form.head_dim != head_dim:
        raise ValueError(f"form for head_dim {form.head_dim}, arrays with {head_dim}")

    def kernel(part: str) -> Kernel:
        return form.kernel(
            part, q.dtype, causal, deterministic=deterministic, dlse=dlse is not None, features=["packed"]
        )

    main = kernel("")
    if q.size == 0 or k.size == 0:
        return
    block_m, block_n = form.tile.block_m, form.tile.block_n
    query_numbers = lengths.numbered_tiles(block_m)
    key_numbers = lengths.numbered_tiles(block_n, keys=True)
    rows = heads * query_numbers * block_m
    lse2 = backend.empty("lse2", (rows,), "fp32")
    delta = backend.empty("delta", (rows,), "fp32")
    dq_accum = backend.empty("dq_accum", (rows * head_dim,), "fp32")
    turns = []
    if deterministic:
        turns = [backend.empty("turns", (heads * query_numbers,), "int32")]
    tables: list[Argument] = [*packed.arguments(), np.int32(lengths.sequences)]
    rows_a_block = WARPGROUP // (head_dim // 8)
    backend.launch(
        kernel("preprocess"),
        (rows // rows_a_block, 1, 1),
        SEQUENCE_BYTES,
        [
            _rows_of_items(out.with_access("r", "out")),
            _rows_of_items(dout.with_access("r", "dout")),
            _rows_of_items(lse.with_access("r", "lse")),
            lse2.with_access("rw"),  # numbers without rows keep what there was
            delta.with_access("rw"),
            dq_accum.with_access("rw"),
            np.int32(heads),
            np.int32(total_q),
            *([] if dlse is None else [_rows_of_items(dlse.with_access("r", "dlse"))]),
            *(array.with_access("rw") for array in turns),
            *tables,
        ],
        stream,
    )
    longest_q, longest_k = lengths.longest_q, lengths.longest_k
    row_bytes = head_dim * (2 * q.itemsize + ITEMSIZE["fp32"])
    backend.launch(
        main,
        (kv_heads * key_numbers, 1, 1),
        form.bytes_of(packed=True),
        [
            TensorMap(q.with_access("r", "q"), block_m, longest_q),
            TensorMap(k.with_access("r", "k"), block_n, longest_k),
            TensorMap(v.with_access("r", "v"), block_n, longest_k),
            TensorMap(dout.with_access("r", "dout"), block_m, longest_q),
            TensorMap(dk.with_access("w", "dk"), 64, longest_k),
            TensorMap(dv.with_access("w", "dv"), 64, longest_k),
            lse2.with_access("r"),
            delta.with_access("r"),
            dq_accum.with_access("atomic"),
            np.int32(lengths.sequences),
            np.int32(kv_heads),
            np.int32(heads // kv_heads),
            np.int32(longest_q),
            np.int32(longest_k),
            np.float32(scale),
            np.float32(scale) * np.float32(math.log2(math.e)),
            np.int32(heads_per_group(kv_heads, heads // kv_heads * longest_q * row_bytes)),
            *(array.with_access("atomic") for array in turns),
            *packed.arguments(),
            np.int32(query_numbers),
        ],
        stream,
        pdl=pdl,
    )
    backend.launch(
        kernel("postprocess"),
        (heads * query_numbers, 1, 1),
        form.post_shared_bytes + SEQUENCE_BYTES,
        [
            dq_accum.with_access("r"),
            _rows_of_items(dq.with_access("w", "dq")),
            np.int32(heads),
            np.int32(total_q),
            np.float32(scale),
            *tables,
        ],
        stream,
        pdl=pdl,
    )


def side_by_side(heads: int, longest_k: int, row_bytes: int) -> int:
    """Heads whose tiles of a sequence run side by side: so many that K and V of the longest fit in
    L2. A power of two, or all ``heads``."""
    return heads_per_group(heads, 2 * longest_k * row_bytes)


def _rows_of_items(rows: Array) -> Array:
    """(1, H, total, …) as the kernels get it, who count a sequence's rows from where it starts: its
    start is the item, and items are a row apart."""
    return replace(rows, strides=(rows.strides[2], *rows.strides[1:]))
