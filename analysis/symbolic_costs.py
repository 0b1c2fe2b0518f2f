"""One attention pass as SymPy expressions, exact for ragged tiles and the causal mask.

``analysis.symbolic`` writes traffic for lengths that the tile divides, in V visited tile pairs. Two
row totals take V's place here and lift that limit: R_q, the query rows moved when every query tile
is moved once per visit, and R_k, the same of key tiles. Dense they are Tc·Nq and Tr·Nk with whole
tiles rounded up; under the causal mask they are sums over the query tiles.

From the traffic follow memory, FLOPs, each tensor's first touch of HBM and a time bound, all in the
same symbols. The report typesets them and prints its calculator from them. The causal forms
need N_k >= N_q, so that every query sees a key. Tests hold everything to the integer sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import sympy as sp

from analysis import algorithms, memory
from analysis.algorithms import Family
from analysis.flops import THREADS_A_ROW, products
from analysis.shapes import AttentionShape
from analysis.symbolic import FORMS, STATISTIC, Bc, Br, Nk, Nq, V, d, e

B, H, Hk = sp.symbols("B H H_k", positive=True)
"""Batch, query heads, key/value heads."""
Rq, Rk = sp.symbols("R_q R_k", positive=True)
"""Rows of one head moved per visit of a query tile, of a key tile."""
P = sp.symbols("P", positive=True)
"""(query, key) pairs of one head inside visited tiles."""
F, X, S, W = sp.symbols("F X S W", positive=True)
"""Ceilings: tensor-core FLOPs, exponentials, SM-boundary bytes and HBM bytes per second."""

ALGORITHMS = tuple(dict.fromkeys(algorithm for algorithm, _ in FORMS))
"""Those with closed forms."""

_i = sp.symbols("i", integer=True, nonnegative=True)
QUERY_TILES = sp.ceiling(Nq / Br)
KEY_TILES = sp.ceiling(Nk / Bc)

Entries = dict[tuple[str, str], sp.Expr]


def row_totals(causal: bool) -> dict[sp.Symbol, sp.Expr]:
    """R_q, R_k, P and the visited tile pairs V of one head."""
    if not causal:
        pairs = QUERY_TILES * KEY_TILES
        return {Rq: KEY_TILES * Nq, Rk: QUERY_TILES * Nk, P: Nq * Nk, V: pairs}
    rows = sp.Min(Br, Nq - _i * Br)
    seen = sp.Min((_i + 1) * Br, Nq) + Nk - Nq  # keys before the last query's diagonal
    visits = sp.ceiling(seen / Bc)
    keys = sp.Min(visits * Bc, Nk)

    def over_query_tiles(term: sp.Expr) -> sp.Expr:
        return sp.Sum(term, (_i, 0, QUERY_TILES - 1))

    return {
        Rq: over_query_tiles(visits * rows),
        Rk: over_query_tiles(keys),
        P: over_query_tiles(rows * keys),
        V: over_query_tiles(visits),
    }


def traffic(algorithm: str, pass_: str) -> Entries:
    """(tensor, direction) -> bytes at the SM boundary, all heads, in R_q and R_k.

    With grouped heads the backward key tile is loaded and stored once per key/value head, the
    forward one by every query head.
    """
    shared = {"k", "v", "dk", "dv"} if pass_ == "backward" else set()
    entries = {}
    for (tensor, direction), form in FORMS[_form_of(algorithm, pass_)].items():
        in_rows = sp.expand(form).subs({V * Br: Rq, V * Bc: Rk})
        in_rows = in_rows.subs({sp.Symbol("T_r", positive=True): QUERY_TILES,
                                sp.Symbol("T_c", positive=True): KEY_TILES})  # fmt: skip
        heads = Hk if tensor in shared and algorithms.find(algorithm).tiled else H
        entries[tensor, direction] = B * heads * sp.factor_terms(in_rows)
    return entries


def _form_of(algorithm: str, pass_: str) -> tuple[str, str]:
    same_forward = algorithm == "flash-deterministic" and pass_ == "forward"
    return ("flash" if same_forward else algorithm, pass_)


QUERY, KEY = B * H * Nq * d * e, B * Hk * Nk * d * e
ROW, ACCUMULATOR = B * H * Nq * STATISTIC, B * H * Nq * d * STATISTIC
SCORES = B * H * Nq * Nk * e


def compulsory(algorithm: str, pass_: str) -> tuple[sp.Expr, sp.Expr]:
    """HBM bytes read and written when each kernel touches each of its tensors once."""
    q, k, row, acc, score = QUERY, KEY, ROW, ACCUMULATOR, SCORES
    moved = traffic(algorithm, pass_)

    def once(tensor: str, size: sp.Expr, direction: str = "read") -> sp.Expr:
        return sp.Min(moved[tensor, direction], size)

    forward = pass_ == "forward"
    if algorithm == "standard":
        if forward:
            return q + 2 * k + 2 * score, q + 2 * score
        return 3 * q + 2 * k + 5 * score, q + 2 * k + 2 * score
    if algorithm == "flash1-literal":
        if forward:
            return 2 * q + 2 * k + 2 * row, 2 * q + 4 * row
        return 4 * q + 2 * k + 2 * row, 2 * q + 2 * k
    if algorithm == "flash1-skip-first":
        if forward:
            again = once("out", q) + once("l", row) + once("m", row)
            return q + 2 * k + again, q + 2 * row
        again = once("dq", q) + once("delta", row)
        return 3 * q + 2 * k + 2 * row + again, q + 2 * k + row
    if algorithm == "flash1-released":
        if forward:
            tmp = once("out_tmp", acc)
            return q + 2 * k + tmp + once("lse", row), q + row + once("out_tmp", acc, "write")
        tmp = once("dq_tmp", acc)
        again = tmp + once("delta", row)
        return 3 * q + 2 * k + row + again, q + 2 * k + row + once("dq_tmp", acc, "write")
    if forward:
        return q + 2 * k, q + row
    if algorithm == "flash-deterministic":
        partials = B * H * Rq * d * STATISTIC
        return 4 * q + 2 * k + 2 * row + partials, q + 2 * k + row + partials
    return 4 * q + 2 * k + 2 * row + 2 * acc, q + 2 * k + row + 2 * acc


@dataclass(frozen=True)
class _Shape:
    """What ``analysis.memory`` asks of a shape, in symbols."""

    seqlen_k: int
    """A number only for the one comparison that the released 2022 kernels make."""
    itemsize: sp.Expr = e
    query_bytes: sp.Expr = QUERY
    key_bytes: sp.Expr = KEY
    row_bytes: sp.Expr = ROW
    score_bytes: sp.Expr = SCORES


def _sum(tensors: Callable[[AttentionShape], list[memory.LiveTensor]], seqlen_k: int) -> sp.Expr:
    shape = cast(AttentionShape, _Shape(seqlen_k))
    return sp.sympify(sum(cast(Any, t.bytes) for t in tensors(shape)))


def saved_bytes(algorithm: str) -> sp.Expr:
    """What lies between forward and backward: the lists of ``analysis.memory``, added up."""
    if algorithm == "standard":
        return _sum(lambda s: memory.saved_for_backward("standard", s), 1)
    two = algorithms.find(algorithm).form in ("literal", "skip-first")
    statistics = "m, l" if two else "lse"
    return _sum(lambda s: memory.saved_for_backward("flash", s, statistics=statistics), 1)


def peak_bytes(algorithm: str, pass_: str) -> sp.Expr:
    """What is alive at the worst moment of a pass, from the same lists."""
    if pass_ == "forward":
        if algorithm == "standard":
            return _sum(lambda s: memory.saved_for_backward("standard-with-scores", s), 1)
        return saved_bytes(algorithm)
    if algorithm == "standard":
        return _sum(memory.standard_backward_peak, 1)
    if algorithms.find(algorithm).family is Family.FLASH1:
        limit = memory.FLASH1_SINGLE_TILE_SEQLEN
        short, long = (_sum(memory.flash1_backward_peak, n) for n in (limit, limit + 1))
        return sp.Piecewise((short, Nk <= limit), (long, True))
    peak = _sum(memory.flash_backward_peak, 1)
    if algorithm == "flash-deterministic":
        return peak + (KEY_TILES - 1) * ACCUMULATOR
    return peak


def useful_flops(algorithm: str, pass_: str, pairs: sp.Expr) -> sp.Expr:
    """Products over the visible pairs of every head."""
    return products(pass_, recompute=algorithm != "standard") * 2 * B * H * pairs * d


def executed_flops(algorithm: str, pass_: str) -> sp.Expr:
    """Products over whole visited tiles; standard attention skips nothing."""
    recompute = algorithm != "standard"
    pairs = P if recompute else Nq * Nk
    return products(pass_, recompute=recompute) * 2 * B * H * pairs * d


def exponentials(algorithm: str, pass_: str, tanh: sp.Expr = sp.S.Zero) -> sp.Expr:
    """One per visited pair; in a tiled forward pass also one per row, visit and thread of a row.
    tanh: special-function operations of a capped score's, 0 without a cap."""
    if algorithm == "standard":
        return B * H * Nq * Nk if pass_ == "forward" else sp.Integer(0)
    of_pairs = P * (1 + tanh)
    return B * H * (of_pairs + THREADS_A_ROW * Rq) if pass_ == "forward" else B * H * of_pairs


def times(algorithm: str, pass_: str) -> dict[str, sp.Expr]:
    """Seconds at each ceiling, all kernels together and all SMs busy; HBM as compulsory bytes.

    Their maximum is a lower bound of ``analysis.time_model``, which takes kernels one by one, idle
    SMs and re-reads behind L2 into account.
    """
    return {
        "tensor cores": executed_flops(algorithm, pass_) / F,
        "exponentials": exponentials(algorithm, pass_) / X,
        "SM boundary": sum(traffic(algorithm, pass_).values()) / S,
        "HBM": sum(compulsory(algorithm, pass_)) / W,
    }


def values_of(
    shape: AttentionShape, block_m: int, block_n: int, rates: tuple[float, float, float, float]
) -> dict[sp.Symbol, float]:
    """The symbols' values, row totals included; rates are F, X, S, W.

    Raises ValueError for a causal shape with seqlen_k < seqlen_q.
    """
    if shape.causal and shape.seqlen_k < shape.seqlen_q:
        raise ValueError(
            f"the causal forms need seqlen_k >= seqlen_q, got {shape.seqlen_k} < {shape.seqlen_q}"
        )
    values: dict[sp.Symbol, float] = {
        B: shape.batch, H: shape.heads, Hk: shape.kv_heads, Nq: shape.seqlen_q,
        Nk: shape.seqlen_k, d: shape.head_dim, e: shape.itemsize, Br: block_m, Bc: block_n,
    }  # fmt: skip
    totals = {symbol: evaluate(total, values) for symbol, total in row_totals(shape.causal).items()}
    return values | totals | dict(zip((F, X, S, W), rates, strict=True))


def evaluate(expression: sp.Expr, values: Mapping[sp.Symbol, float]) -> float:
    """The expression's number; whole for whole inputs, except of times. All symbols are needed."""
    symbols, function = _compiled(expression)
    result: float = function(*(values[symbol] for symbol in symbols))
    return result


@cache
def _compiled(expression: sp.Expr) -> tuple[tuple[sp.Symbol, ...], Callable[..., float]]:
    symbols = tuple(sorted(expression.free_symbols, key=str))
    return symbols, sp.lambdify(symbols, expression, [{"choose": _chosen}, "math"])


def _chosen(x: float, then: float, otherwise: float) -> float:
    """``analysis.symbolic_loop.choose``."""
    return then if x > 0 else otherwise
