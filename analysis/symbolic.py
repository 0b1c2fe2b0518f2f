"""Closed forms of the traffic sums: printed in the report, differentiated, compared by growth.

For lengths that the tile divides, every sum of ``analysis.sums`` is a polynomial in the tile counts
Tr = Nq/Br and Tc = Nk/Bc. Those polynomials are written here, once, in SymPy; tests hold them to
the sums wherever both apply. With ragged tails or bottom-right causal masks of unequal lengths
the integer sums are the definition and no closed form is given.

Bytes are for one head; e is the bytes of an element, 4 those of a row statistic or accumulator.
The causal forms are for Nq = Nk = N and square tiles, where T(T+1)/2 of T² tile pairs are visited.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import sympy as sp

from analysis.shapes import AttentionShape, Tile

Nq, Nk, N = sp.symbols("N_q N_k N", positive=True)
d, e, M = sp.symbols("d e M", positive=True)
Br, Bc = sp.symbols("B_r B_c", positive=True)
Tr, Tc = sp.symbols("T_r T_c", positive=True)
s = sp.symbols("s", positive=True)
"""Density of a block mask: the fraction of tile pairs visited."""
V = sp.symbols("V", positive=True)
"""Visited tile pairs of one head."""

STATISTIC = 4

Form = Mapping[tuple[str, str], sp.Expr]


def _form(entries: dict[tuple[str, str], sp.Expr]) -> Form:
    return MappingProxyType(entries)


# In terms of V: query tiles move V·Br rows in all, key tiles V·Bc. Dense: V = Tr·Tc, so these are
# Tc·Nq and Tr·Nk.
_query_visits = V * Br
_key_visits = V * Bc
_row = d * e

FORMS: Mapping[tuple[str, str], Form] = MappingProxyType(
    {
        ("standard", "forward"): _form(
            {
                ("q", "read"): Tc * Nq * _row,
                ("k", "read"): Tr * Nk * _row,
                ("v", "read"): Tr * Nk * _row,
                ("s", "write"): Nq * Nk * e,
                ("s", "read"): Nq * Nk * e,
                ("p", "write"): Nq * Nk * e,
                ("p", "read"): Nq * Nk * e,
                ("out", "write"): Nq * _row,
            }
        ),
        ("standard", "backward"): _form(
            {
                ("p", "read"): 2 * Nq * Nk * e,
                ("dp", "write"): Nq * Nk * e,
                ("dp", "read"): Nq * Nk * e,
                ("ds", "write"): Nq * Nk * e,
                ("ds", "read"): 2 * Nq * Nk * e,
                ("dout", "read"): 2 * Tc * Nq * _row,
                ("q", "read"): Tc * Nq * _row,
                ("k", "read"): Tr * Nk * _row,
                ("v", "read"): Tr * Nk * _row,
                ("dq", "write"): Nq * _row,
                ("dk", "write"): Nk * _row,
                ("dv", "write"): Nk * _row,
            }
        ),
        ("flash1-literal", "forward"): _form(
            {
                ("k", "read"): Nk * _row,
                ("v", "read"): Nk * _row,
                ("q", "read"): _query_visits * _row,
                ("out", "read"): _query_visits * _row,
                ("l", "read"): _query_visits * STATISTIC,
                ("m", "read"): _query_visits * STATISTIC,
                ("out", "write"): (_query_visits + Nq) * _row,
                ("l", "write"): (_query_visits + Nq) * STATISTIC,
                ("m", "write"): (_query_visits + Nq) * STATISTIC,
            }
        ),
        ("flash1-literal", "backward"): _form(
            {
                ("k", "read"): Nk * _row,
                ("v", "read"): Nk * _row,
                ("dk", "write"): Nk * _row,
                ("dv", "write"): Nk * _row,
                ("q", "read"): _query_visits * _row,
                ("out", "read"): _query_visits * _row,
                ("dout", "read"): _query_visits * _row,
                ("l", "read"): _query_visits * STATISTIC,
                ("m", "read"): _query_visits * STATISTIC,
                ("dq", "read"): _query_visits * _row,
                ("dq", "write"): (_query_visits + Nq) * _row,
            }
        ),
        ("flash1-skip-first", "forward"): _form(
            {
                ("k", "read"): Nk * _row,
                ("v", "read"): Nk * _row,
                ("q", "read"): _query_visits * _row,
                ("out", "read"): (_query_visits - Nq) * _row,
                ("l", "read"): (_query_visits - Nq) * STATISTIC,
                ("m", "read"): (_query_visits - Nq) * STATISTIC,
                ("out", "write"): _query_visits * _row,
                ("l", "write"): _query_visits * STATISTIC,
                ("m", "write"): _query_visits * STATISTIC,
            }
        ),
        ("flash1-skip-first", "backward"): _form(
            {
                ("k", "read"): Nk * _row,
                ("v", "read"): Nk * _row,
                ("dk", "write"): Nk * _row,
                ("dv", "write"): Nk * _row,
                ("q", "read"): _query_visits * _row,
                ("dout", "read"): _query_visits * _row,
                ("l", "read"): _query_visits * STATISTIC,
                ("m", "read"): _query_visits * STATISTIC,
                ("out", "read"): Nq * _row,
                ("delta", "write"): Nq * STATISTIC,
                ("delta", "read"): (_query_visits - Nq) * STATISTIC,
                ("dq", "read"): (_query_visits - Nq) * _row,
                ("dq", "write"): _query_visits * _row,
            }
        ),
        ("flash1-released", "forward"): _form(
            {
                ("k", "read"): Nk * _row,
                ("v", "read"): Nk * _row,
                ("q", "read"): _query_visits * _row,
                ("out_tmp", "read"): (_query_visits - Nq) * d * STATISTIC,
                ("out_tmp", "write"): (_query_visits - Nq) * d * STATISTIC,
                ("lse", "read"): (_query_visits - Nq) * STATISTIC,
                ("lse", "write"): _query_visits * STATISTIC,
                ("out", "write"): Nq * _row,
            }
        ),
        ("flash1-released", "backward"): _form(
            {
                ("k", "read"): Nk * _row,
                ("v", "read"): Nk * _row,
                ("dk", "write"): Nk * _row,
                ("dv", "write"): Nk * _row,
                ("q", "read"): _query_visits * _row,
                ("dout", "read"): _query_visits * _row,
                ("lse", "read"): _query_visits * STATISTIC,
                ("out", "read"): Nq * _row,
                ("delta", "write"): Nq * STATISTIC,
                ("delta", "read"): (_query_visits - Nq) * STATISTIC,
                ("dq_tmp", "read"): (_query_visits - Nq) * d * STATISTIC,
                ("dq_tmp", "write"): (_query_visits - Nq) * d * STATISTIC,
                ("dq", "write"): Nq * _row,
            }
        ),
        ("flash", "forward"): _form(
            {
                ("q", "read"): Nq * _row,
                ("k", "read"): _key_visits * _row,
                ("v", "read"): _key_visits * _row,
                ("out", "write"): Nq * _row,
                ("lse", "write"): Nq * STATISTIC,
            }
        ),
        ("flash", "backward"): _form(
            {
                ("k", "read"): Nk * _row,
                ("v", "read"): Nk * _row,
                ("dk", "write"): Nk * _row,
                ("dv", "write"): Nk * _row,
                ("q", "read"): _query_visits * _row,
                ("dout", "read"): (_query_visits + Nq) * _row,
                ("out", "read"): Nq * _row,
                ("lse", "read"): _query_visits * STATISTIC,
                ("delta", "write"): Nq * STATISTIC,
                ("delta", "read"): _query_visits * STATISTIC,
                ("dq_accum", "write"): Nq * d * STATISTIC,
                ("dq_accum", "atomic"): _query_visits * d * STATISTIC,
                ("dq_accum", "read"): Nq * d * STATISTIC,
                ("dq", "write"): Nq * _row,
            }
        ),
        ("flash-deterministic", "backward"): _form(
            {
                ("k", "read"): Nk * _row,
                ("v", "read"): Nk * _row,
                ("dk", "write"): Nk * _row,
                ("dv", "write"): Nk * _row,
                ("q", "read"): _query_visits * _row,
                ("dout", "read"): (_query_visits + Nq) * _row,
                ("out", "read"): Nq * _row,
                ("lse", "read"): _query_visits * STATISTIC,
                ("delta", "write"): Nq * STATISTIC,
                ("delta", "read"): _query_visits * STATISTIC,
                ("dq_accum", "write"): _query_visits * d * STATISTIC,
                ("dq_accum", "read"): _query_visits * d * STATISTIC,
                ("dq", "write"): Nq * _row,
            }
        ),
    }
)
"""(algorithm, pass) -> (tensor, direction) -> bytes of one head, in Nq, Nk, d, e, Br, Bc, V."""

ROW_STATISTICS = ("l", "m", "lse", "delta")


def total_form(algorithm: str, pass_: str, *, statistics: bool = True) -> sp.Expr:
    """Sum of a form over tensors and directions; without statistics it is what the papers count."""
    return sp.expand(
        sum(
            expression
            for (tensor, _), expression in FORMS[algorithm, pass_].items()
            if statistics or tensor not in ROW_STATISTICS
        )
    )


def dense(expression: sp.Expr) -> sp.Expr:
    """Every pair visited: V = Tr·Tc, with the tile counts written out."""
    return expression.subs(V, Tr * Tc).subs({Tr: Nq / Br, Tc: Nk / Bc})


def causal(expression: sp.Expr) -> sp.Expr:
    """Nq = Nk = N, square tiles: V = T(T+1)/2 with T = N/Br. Standard attention skips nothing."""
    tiles = N / Br
    visited = tiles * (tiles + 1) / 2
    return expression.subs(V, visited).subs({Tr: tiles, Tc: tiles, Bc: Br, Nq: N, Nk: N})


def block_sparse(expression: sp.Expr) -> sp.Expr:
    """A fraction s of all pairs visited (FlashAttention 2022, Prop. 4)."""
    return expression.subs(V, s * Tr * Tc).subs({Tr: Nq / Br, Tc: Nk / Bc})


def accesses(algorithm: str, pass_: str) -> sp.Expr:
    """Elements moved on the papers' machine for Nq = Nk = N, dense, row statistics left out.

    FlashAttention 2022's are (a·Tc + b)·N·d. An fp32 accumulator counts as 4/e elements.
    """
    total = dense(total_form(algorithm, pass_, statistics=False))
    return sp.expand((total / e).subs({Nq: N, Nk: N}))


def with_paper_tile(expression: sp.Expr) -> sp.Expr:
    """Bc = M/4d and Br = min(Bc, d), ceilings left out (FlashAttention 2022, Alg. 1, line 1)."""
    return expression.subs(Br, sp.Min(Bc, d)).subs(Bc, M / (4 * d))


def growth(expression: sp.Expr, variable: sp.Symbol) -> sp.Expr:
    """Exponent of ``variable`` as it grows: lim of d log f / d log x."""
    slope = variable * sp.diff(expression, variable) / expression
    return sp.limit(sp.simplify(slope), variable, sp.oo)


def square_product_tile() -> tuple[sp.Expr, sp.Expr]:
    """Best tile of the product QKᵀ and its reads, when Br·Bc accumulators fill M.

    Reads N²·d·(1/Br + 1/Bc) under Br·Bc = M: the derivative in Br vanishes at Br = √M, and the
    reads are then 2N²d/√M, the small-cache term of Saha & Ye (2024) with the constant of the
    red-blue pebble bound.
    """
    reads = N**2 * d * (1 / Br + Br / M)
    best = sp.solve(sp.diff(reads, Br), Br)[0]
    return best, sp.simplify(reads.subs(Br, best))


def tallest_query_tile() -> tuple[sp.Expr, sp.Expr]:
    """Best tile of the query-outer forward pass and its accesses, when (2·Br + 2·Bc)·d fill M.

    Q and O tiles of Br rows and K and V tiles of Bc share M. Accesses are 2Nd + 2N²d/Br: they fall
    with Br all the way, so the best is the tallest that leaves one key row, Br = M/2d - 1, and
    accesses tend to 4N²d²/M: Theorem 2's order with a third of FlashAttention 2022's 12.
    """
    total = accesses("flash", "forward")
    assert sp.diff(total, Br).is_negative
    tallest = sp.solve(sp.Eq((2 * Br + 2) * d, M), Br)[0]
    return tallest, sp.simplify(total.subs(Br, tallest))


def evaluate(form: Form, shape: AttentionShape, tile: Tile) -> dict[tuple[str, str], int]:
    """A form at a shape that its tile divides, times batch · heads, as integers.

    Raises ValueError where no closed form applies (see the module's docstring).
    """
    if shape.seqlen_q % tile.block_m or shape.seqlen_k % tile.block_n:
        raise ValueError(f"{tile} does not divide {shape.seqlen_q} x {shape.seqlen_k}")
    if shape.kv_heads != shape.heads:
        raise ValueError(f"heads={shape.heads} share kv_heads={shape.kv_heads}")
    if shape.causal and (shape.seqlen_q != shape.seqlen_k or tile.block_m != tile.block_n):
        raise ValueError("the causal form is for equal lengths and square tiles")
    rows, columns = shape.seqlen_q // tile.block_m, shape.seqlen_k // tile.block_n
    values = {
        Nq: shape.seqlen_q,
        Nk: shape.seqlen_k,
        d: shape.head_dim,
        e: shape.itemsize,
        Br: tile.block_m,
        Bc: tile.block_n,
        Tr: rows,
        Tc: columns,
        V: rows * (rows + 1) // 2 if shape.causal else rows * columns,
    }
    heads = shape.batch * shape.heads
    results = {key: heads * int(expression.subs(values)) for key, expression in form.items()}
    return {key: count for key, count in results.items() if count}
