"""How little any algorithm can move, in elements (or bytes where it says so), one head at a time.

M is the fast memory in elements.
"""

from __future__ import annotations

import math
from dataclasses import replace

from analysis.packed import Lengths, summed
from analysis.shapes import AttentionShape, BiasShape, bias_elements


def compulsory_read_bytes(shape: AttentionShape) -> int:
    """Q, K and V once each, and the scales of e4m3; K and V once per key/value head."""
    return shape.query_bytes + 2 * (shape.key_bytes + shape.scale_bytes)


def compulsory_write_bytes(shape: AttentionShape) -> int:
    """O and the log-sum-exp once."""
    return shape.query_bytes + shape.row_bytes


def compulsory_backward_read_bytes(shape: AttentionShape) -> int:
    """Q, K, V, O, dO and the log-sum-exp once."""
    return 3 * shape.query_bytes + 2 * shape.key_bytes + shape.row_bytes


def compulsory_backward_write_bytes(shape: AttentionShape) -> int:
    """dQ, dK and dV once."""
    return shape.query_bytes + 2 * shape.key_bytes


def compulsory_bias_bytes(shape: AttentionShape, bias: BiasShape) -> int:
    """A stored bias (items, heads, Nq, Nk) once, where some query sees the pair.

    Each pass must read as much, and write as much again for the gradient: the result depends on
    every one of these elements. Unlike FlashAttention's Θ(N²d²/M) it does not shrink with M, so
    that with a bias no algorithm moves fewer than Θ(N²) elements a head that has its own.
    """
    pairs = bias_elements(shape, bias) // (shape.seqlen_q * shape.seqlen_k) * shape.visible_pairs
    return pairs * shape.itemsize


def compulsory_packed_bytes(shape: AttentionShape, lengths: Lengths, pass_: str) -> int:
    """The least that a pass over packed sequences moves: the sum of their bounds.

    Sequences share no data, so that the rows of each must cross for itself; packing changes no
    bound, it takes away what padding adds. Each is that of the functions above; a sequence without
    keys still writes its rows, and one without queries the gradients of its keys. The tables are
    not in it: lengths could be known to the kernel otherwise.

    shape: heads, head_dim and type; its lengths do not matter. pass_: "forward" or "backward".
    """
    rows = replace(shape, batch=1, seqlen_q=1, seqlen_k=1)
    lone_q = sum(q for q, k in zip(lengths.queries, lengths.keys, strict=True) if not k)
    lone_k = sum(k for q, k in zip(lengths.queries, lengths.keys, strict=True) if not q)
    if pass_ == "forward":
        both = summed(lambda x: compulsory_read_bytes(x) + compulsory_write_bytes(x), shape, lengths)
        return both + lone_q * compulsory_write_bytes(rows)
    both = summed(lambda x: compulsory_backward_read_bytes(x) + compulsory_backward_write_bytes(x), shape, lengths)
    return both + lone_q * rows.query_bytes + lone_k * 2 * rows.key_bytes


def matmul_accesses_rectangular(rows: float, columns: float, inner: float, m: float) -> float:
    """2·rows·columns·inner/√M, the same for a rectangular product, and never less than reading both
    operands and writing the result once."""
    _require_positive(rows=rows, columns=columns, inner=inner, m=m)
    compulsory = rows * inner + inner * columns + rows * columns
    return max(2 * rows * columns * inner / math.sqrt(m), compulsory)


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} is not positive")
