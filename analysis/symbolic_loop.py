"""A shape and its tile loop in SymPy symbols, so that the sums themselves yield closed forms.

``analysis.sums`` add up what a tile loop has counted: rows moved per visit, rows with a visit and
so on. Given :func:`shape` they add up symbols instead, whatever mask made the counts. The counts of
a causal mask, a sliding window and sinks are sums over the tiles (:func:`totals`), each term what
``analysis.window`` says of one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import sympy as sp

from analysis.shapes import AttentionShape, Tile
from analysis.symbolic import STATISTIC, Bc, Br, Nk, Nq, V, d, e
from analysis.symbolic_costs import KEY_TILES, QUERY_TILES, B, H, Hk, P, Rk, Rq, evaluate
from analysis.tile_loop import TileLoop, tile_loop
from analysis.window import Window

Q1, K1, T1 = sp.symbols("Q_1 K_1 T_1", positive=True)
"""Of one head, those with a visit at all: query rows, key rows, query tiles."""
PAIRS, SEEING, SEEN = sp.symbols("n s_q s_k", positive=True)
"""Of one head: visible pairs, queries that see a key, keys that are seen."""
LEFT, RIGHT, SINKS = sp.symbols("left right sinks", nonnegative=True)
"""Bounds of ``analysis.window.Window``: as numbers, also where they are unlimited."""


class choose(sp.Function):  # noqa: N801
    """choose(x, a, b) is a where x > 0, else b: a Piecewise whose condition SymPy leaves alone; it
    fails to simplify those of a window."""

    nargs = 3


class Symbols:
    """Arithmetic on symbols under NumPy's names."""

    @staticmethod
    def minimum(*values: Any) -> sp.Expr:
        return sp.Min(*values)

    @staticmethod
    def maximum(*values: Any) -> sp.Expr:
        return sp.Max(*values)

    @staticmethod
    def where(condition: Any, then: Any, otherwise: Any) -> sp.Expr:
        if condition in (sp.true, sp.false):
            return then if condition else otherwise
        return choose(condition.gts - condition.lts, then, otherwise)


@dataclass(frozen=True)
class Loop:
    """The totals that sums ask of ``analysis.tile_loop.TileLoop``."""

    shape: SymbolicShape

    query_tiles = QUERY_TILES
    key_tiles = KEY_TILES

    @property
    def copies(self) -> sp.Expr:
        return self.shape.batch * self.shape.heads

    @property
    def visits(self) -> sp.Expr:
        return self.copies * V

    @property
    def query_tiles_with_a_visit(self) -> sp.Expr:
        return self.copies * T1

    @property
    def query_rows_visited(self) -> sp.Expr:
        return self.copies * Rq

    @property
    def key_rows_visited(self) -> sp.Expr:
        return self.copies * Rk

    @property
    def query_rows_with_a_visit(self) -> sp.Expr:
        return self.copies * Q1

    @property
    def key_rows_with_a_visit(self) -> sp.Expr:
        return self.shape.batch * self.shape.kv_heads * K1


@dataclass(frozen=True)
class _Visible:
    """What is asked of ``AttentionShape.visible``."""

    rows_that_see = SEEING
    keys_seen = SEEN


@dataclass(frozen=True)
class SymbolicShape:
    """What sums ask of ``AttentionShape``. partial: a mask leaves pairs that no tile visits."""

    kv_heads: sp.Expr = Hk
    partial: bool = False

    batch, heads, seqlen_q, seqlen_k, head_dim, itemsize = B, H, Nq, Nk, d, e
    visible_pairs, visible, windowed = PAIRS, _Visible(), False
    fp8, key_itemsize, scale_bytes = False, e, 0

    @property
    def causal(self) -> bool:
        return self.partial

    @property
    def query_bytes(self) -> sp.Expr:
        return B * H * Nq * d * e

    @property
    def key_bytes(self) -> sp.Expr:
        return B * self.kv_heads * Nk * d * e

    @property
    def score_bytes(self) -> sp.Expr:
        return B * H * Nq * Nk * e

    @property
    def row_bytes(self) -> sp.Expr:
        return B * H * Nq * STATISTIC


def shape(*, grouped: bool = True, partial: bool = False) -> AttentionShape:
    """The symbols' shape, for functions that are annotated with a shape of numbers.

    grouped: there may be fewer key/value heads than query heads.
    """
    return cast(AttentionShape, SymbolicShape(Hk if grouped else H, partial))


@dataclass(frozen=True)
class _Tile:
    block_m, block_n = Br, Bc


TILE = cast(Tile, _Tile())
"""B_r x B_c."""


@tile_loop.register
def _(  # type: ignore[misc]  # no AttentionShape, but all that sums ask of one
    shape: SymbolicShape, tile: Tile, *masks: object
) -> TileLoop:
    assert not any(masks), "no symbols for a block mask"
    return cast(TileLoop, Loop(shape))


def values_of(shape: AttentionShape, tile: Tile) -> dict[sp.Symbol, float]:
    """The symbols' values for a shape and tile of numbers, counts included."""
    window = shape.visible
    values: dict[sp.Symbol, float] = {
        B: shape.batch, H: shape.heads, Hk: shape.kv_heads, Nq: shape.seqlen_q,
        Nk: shape.seqlen_k, d: shape.head_dim, e: shape.itemsize, Br: tile.block_m,
        Bc: tile.block_n, LEFT: window.left, RIGHT: window.right, SINKS: window.sinks,
    }  # fmt: skip
    return values | {each: evaluate(x, values) for each, x in totals(shape.causal).items()}


@cache
def totals(causal: bool) -> dict[sp.Symbol, sp.Expr]:
    """The counts of one head, in N_q, N_k, B_r, B_c and the window's bounds."""
    window = Window(Nq, Nk, LEFT, sp.S.Zero if causal else RIGHT, SINKS, causal)
    i = sp.symbols("i", integer=True, nonnegative=True)

    def over(tiles: sp.Expr, term: sp.Expr) -> sp.Expr:
        return sp.Sum(term, (i, 0, tiles - 1))

    def met(visits: sp.Expr, then: Any) -> sp.Expr:
        return Symbols.where(visits > 0, then, 0)

    sinks, first, end = window.key_tiles_from(i * Br, Br, Bc, Symbols)
    keys = sinks + end - first
    start, stop = window.query_tiles_from(i * Bc, Br, Bc, Symbols)
    queries = stop - start
    query_rows, key_rows = sp.Min(Br, Nq - i * Br), sp.Min(Bc, Nk - i * Bc)
    rows_met = sp.Min(stop * Br, Nq) - sp.Min(start * Br, Nq)
    return {
        V: over(QUERY_TILES, keys),
        Rq: over(QUERY_TILES, keys * query_rows),
        Rk: over(KEY_TILES, queries * key_rows),
        P: over(KEY_TILES, key_rows * rows_met),
        Q1: over(QUERY_TILES, met(keys, query_rows)),
        K1: over(KEY_TILES, met(queries, key_rows)),
        T1: over(QUERY_TILES, met(keys, 1)),
        PAIRS: window.pairs(Symbols),
        SEEING: window.rows(Symbols),
        SEEN: window.keys(Symbols),
    }
