"""How little any algorithm can move, in elements (or bytes where it says so), one head at a time.

N is the sequence length, d the head dimension, M the fast memory in elements. Bounds with Θ carry
no constant; they are compared by growth, never by value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from analysis.packed import Lengths, summed
from analysis.shapes import AttentionShape
from analysis.sums.flash import BiasShape, bias_elements


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
        both = summed(
            lambda x: compulsory_read_bytes(x) + compulsory_write_bytes(x), shape, lengths
        )
        return both + lone_q * compulsory_write_bytes(rows)
    both = summed(
        lambda x: compulsory_backward_read_bytes(x) + compulsory_backward_write_bytes(x),
        shape,
        lengths,
    )
    return both + lone_q * rows.query_bytes + lone_k * 2 * rows.key_bytes


def packed_order(lengths: Sequence[int], d: float, m: float) -> float:
    """Θ(Σ (n d + n² d² / M)): FlashAttention over sequences of n tokens, as Thm 2 has each.

    With n d below M a sequence fits into fast memory and moves its inputs and output alone: that
    is the order of a batch of short sequences however many they are. Padded to L, each costs as one
    of L tokens.
    """
    _require_positive(d=d, m=m)
    return sum(n * d + n * n * d * d / m if n * d > m else n * d for n in lengths)


def bias_order(n: float, d: float, m: float) -> float:
    """Θ(N² + N²d²/M): exact attention with a stored bias; the bias, and what is moved without it.

    FlashAttention with a bias reaches it. The bias is the larger term for M above d², which is
    where FlashAttention pays at all (Saha & Ye 2024).
    """
    return n * n + flash_order(n, d, m)


def standard_order(n: float, d: float) -> float:
    """Θ(Nd + N²): standard attention, forward or backward (FlashAttention 2022, Thm 2, Thm 5)."""
    return n * d + n * n


def flash_order(n: float, d: float, m: float) -> float:
    """Θ(N²d²/M): FlashAttention, forward or backward, for d ≤ M ≤ Nd (Thm 2, Thm 5)."""
    _require_theorem_range(n, d, m)
    return n * n * d * d / m


def block_sparse_order(n: float, d: float, m: float, density: float) -> float:
    """Θ(Nd + N²d²·s/M): block-sparse FlashAttention, s the share of non-zero blocks (Prop. 4)."""
    _require_theorem_range(n, d, m)
    if not 0 <= density <= 1:
        raise ValueError(f"density={density} is outside [0, 1]")
    return n * d + density * n * n * d * d / m


def window_order(n: float, d: float, m: float, window: float) -> float:
    """Θ(Nd + N·w·d²/M): FlashAttention in a window of w keys, as Prop. 4 has it with s = w/N.

    The theorem's N²d²/M with N keys become w. A fast memory of M = Θ(w·d), which holds the keys of
    one window, moves no more than inputs and output; without a window that takes Θ(N·d).
    """
    _require_positive(n=n, d=d, m=m, window=window)
    if window > n:
        raise ValueError(f"window={window} is more than the N={n} keys there are")
    return n * d + n * window * d * d / m


def excluded_by_proposition_3(n: float, d: float, m: float, accesses: float) -> bool:
    """Whether a claimed access count contradicts the argument of Prop. 3.

    The proposition says that no exact algorithm needs o(N²d²/M) accesses for *every* M in [d, Nd].
    Its proof looks at M = Θ(Nd), where the expression is Θ(Nd), the size of the inputs and the
    output, which live in slow memory. So what is excluded, at any M, is moving fewer elements
    than Q, K, V and O have. It does not exclude beating N²d²/M at a smaller M: for M < d² that is
    possible (Saha & Ye 2024).
    """
    _require_theorem_range(n, d, m)
    return accesses < 4 * n * d


def saha_ye_order(n: float, d: float, m: float) -> float:
    """Θ(min(N²d²/M, N²d/√M)): tight for exact attention (Saha & Ye 2024), and at least Θ(Nd).

    The terms meet at M = d². Above it FlashAttention is optimal; below it attention costs what the
    product QKᵀ costs. Beyond M = N·d both are below the inputs and the output, which are read and
    written once whatever M is.
    """
    _require_positive(n=n, d=d, m=m)
    return max(min(n * n * d * d / m, n * n * d / math.sqrt(m)), n * d)


def saha_ye_regime(d: float, m: float) -> str:
    """ "large cache" for M ≥ d², where N²d²/M is the smaller term, else "small cache"."""
    _require_positive(d=d, m=m)
    return "large cache" if m >= d * d else "small cache"


def matmul_accesses(n: float, m: float) -> float:
    """2N³/√M: leading term of an N × N × N product's least traffic, reached by √M × √M tiles.

    The red–blue pebble game of Hong and Kung (1981); the constant 2 after Smith et al. (2019) and
    Kwasniewski et al. (2019).
    """
    return matmul_accesses_rectangular(n, n, n, m)


def matmul_accesses_rectangular(rows: float, columns: float, inner: float, m: float) -> float:
    """2·rows·columns·inner/√M, the same for a rectangular product, and never less than reading both
    operands and writing the result once."""
    _require_positive(rows=rows, columns=columns, inner=inner, m=m)
    compulsory = rows * inner + inner * columns + rows * columns
    return max(2 * rows * columns * inner / math.sqrt(m), compulsory)


def _require_theorem_range(n: float, d: float, m: float) -> None:
    _require_positive(n=n, d=d, m=m)
    if not d <= m <= n * d:
        raise ValueError(f"the theorem needs d <= M <= N·d, got d={d}, M={m}, N·d={n * d}")


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} is not positive")
