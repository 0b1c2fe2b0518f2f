"""Options that say which keys a query sees."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np

from analysis.algorithms import Family
from analysis.feature import TENSOR_CORES, Feature, Fields, Given, Pairs, Spelling, Walk
from analysis.packed import Lengths
from analysis.problem import Problem
from analysis.shapes import KernelBytes, Tile

MASK_BYTES = 1
"""Bytes of one entry of a key mask or of a block mask."""

CAUSAL = Feature(
    "causal",
    "a causal mask",
    "causal",
    lambda p: p.shape.causal,
    lambda r, p: {"causal": True},
    "CAUSAL",
    tuple(Family),
    optimistic=True,
    given=("causal",),
    seen=lambda at, given: at.keys <= at.diagonal,
    spelled=(
        Spelling(
            "mask",
            "none, causal, or both as none,causal",
            lambda word, heads: {"causal": word == "causal"},
            "words",
            ("none", "causal"),
            "none",
            short=("causal", "causal"),
        ),
    ),
    shown={"`causal`": {"causal": True}},
)

KEY_MASK = Feature(
    "key_mask",
    "a key mask",
    "key_mask",
    lambda p: p.key_mask,
    lambda r, p: {"key_mask": True},
    "KEY_MASK",
    with_packed=False,
    registers=True,
    arrays=lambda p: {"key_mask": ((p.shape.batch, p.shape.seqlen_k), "uint8")},
    reads=lambda walk: {"key_mask": walk.key_rows * MASK_BYTES},
    sizes=lambda shape: {"key_mask": shape.batch * shape.seqlen_k * MASK_BYTES},
    given=("key_mask",),
    seen=lambda at, given: given["key_mask"].bool()[:, None, None, :],
    spelled=(
        Spelling(
            "key-mask", "keys may be taken out, each item's own: a byte a key", lambda _, heads: {"key_mask": True}
        ),
    ),
    shown={"`key_mask`": {"key_mask": True}},
)


def _block_mask(random: Random, problem: Problem) -> Fields | None:
    shape, tile = problem.shape, problem.tile
    tile = tile or random.choice((Tile(64, 64), Tile(32, 64), Tile(16, 16)))
    blocks = (-(-shape.seqlen_q // tile.block_m), -(-shape.seqlen_k // tile.block_n))
    numbers = np.random.default_rng(random.randrange(2**31))
    bits = numbers.random((shape.batch, shape.heads, *blocks)) < random.choice((0.2, 0.6, 1.0))
    return {"block_mask": bits, "tile": tile}


def _block_mask_array(problem: Problem) -> Mapping[str, tuple[tuple[int, ...], str]]:
    shape, tile = problem.shape, problem.tile
    assert tile is not None
    blocks = (-(-shape.seqlen_q // tile.block_m), -(-shape.seqlen_k // tile.block_n))
    return {"block_mask": ((shape.batch, shape.heads, *blocks), "uint8")}


def _looked_at(walk: Walk) -> Mapping[str, int]:
    return {"block_mask": walk.heads * walk.loop.pairs_left_by_causal * MASK_BYTES}


def _in_the_postprocess(walk: Walk) -> KernelBytes:
    """An ordered workspace: which partial tiles were written."""
    if not walk.options.get("deterministic"):
        return {}
    return {f"{walk.entry}_postprocess": {(name, "read"): count for name, count in _looked_at(walk).items()}}


def _blocks_seen(at: Pairs, given: Given) -> Any:
    if given.get("block") is None:
        raise ValueError("block_mask needs block = (block_m, block_n), got None")
    rows, columns = given["block"]
    wide = given["block_mask"].bool().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide[..., : len(at.diagonal), : at.keys.shape[1]]


BLOCK_MASK = Feature(
    "block_mask",
    "a block mask",
    "block_mask",
    lambda p: p.block_mask is not None,
    _block_mask,
    "BLOCK_SPARSE",
    with_packed=False,
    registers=True,
    arrays=_block_mask_array,
    reads=_looked_at,
    beside=_in_the_postprocess,
    given=("block_mask", "block"),
    seen=_blocks_seen,
    shown={"`block_mask`": {"block_mask": np.ones((1, 1, 1, 1), bool), "tile": Tile(64, 64)}},
)


def _window(random: Random, problem: Problem) -> Fields:
    sides = (None, 0, 1, 15, 16, 64, random.randrange(200))
    window = (random.choice(sides), random.choice(sides))
    return {"window": window, "sinks": random.choice((0, 0, 1, 4, 70))}


def _window_sees(at: Pairs, given: Given) -> Any:
    left, right = given["window"]
    sinks = at.keys < given.get("sinks", 0)
    seen: Any = True
    if left is not None:
        seen = seen & ((at.keys >= at.diagonal - left) | sinks)
    if right is not None:
        seen = seen & ((at.keys <= at.diagonal + right) | sinks)
    return seen


WINDOW = Feature(
    "window",
    "a window",
    "window",
    lambda p: p.windowed,
    _window,
    "WINDOW",
    TENSOR_CORES,
    registers=True,
    given=("window", "sinks"),
    seen=_window_sees,
    spelled=(
        Spelling(
            "window",
            "left,right: keys before and after its own place that a query sees, as 1024,0; "
            "none on a side: all; several as 256,0;1024,0",
            lambda sides, heads: {"window": sides},
            "windows",
            usual="none",
        ),
        Spelling(
            "sinks",
            "first keys, seen whatever the window",
            lambda count, heads: {"sinks": count},
            "numbers",
            usual="0",
            least=0,
        ),
    ),
    shown={"`window`": {"window": (128, 0)}, "`window` and `sinks`": {"window": (128, 0), "sinks": 4}},
)


def _packed_array(problem: Problem) -> Mapping[str, tuple[tuple[int, ...], str]]:
    assert problem.lengths is not None
    size = (problem.lengths.sequences + 1,)
    return dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), (size, "int32"))


def _lengths(random: Random, problem: Problem) -> Fields:
    edges = (0, 1, 17, 64, 100)
    queries = (1, *(random.choice(edges) for _ in range(random.choice((0, 1, 2, 7)))))
    keys = tuple(random.choice((rows, *edges)) if at else 1 for at, rows in enumerate(queries))
    return of_lengths(Lengths(queries, keys))


def of_lengths(lengths: Lengths) -> Fields:
    """Fields of a problem of packed sequences."""
    return {"lengths": lengths, "batch": 1, "seqlen_q": lengths.total_q, "seqlen_k": lengths.total_k}


PACKED = Feature(
    "packed",
    "packed sequences",
    "packed",
    lambda p: p.lengths is not None,
    _lengths,
    "PACKED",
    TENSOR_CORES,
    arrays=_packed_array,
    spelled=(
        Spelling(
            "seqlens",
            "lengths of packed sequences, as 1,17,300, or a file of numbers; in the place of --batch and --seqlen",
            lambda lengths, heads: of_lengths(lengths),
            "lengths",
        ),
    ),
    shown={"`cu_seqlens_q`, `cu_seqlens_k`": of_lengths(Lengths.equal((1000, 0, 24)))},
)
