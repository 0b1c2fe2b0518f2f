"""Options of the keys' type and of the order of the walk."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from analysis.algorithms import ORDERS
from analysis.feature import TENSOR_CORES, Feature, Fields, Sizes, Spelling, Walk
from analysis.problem import Problem
from analysis.shapes import SCALE_BYTES, SCALE_UNIT, scale_blocks


def _fp8(random: Random, problem: Problem) -> Fields | None:
    if problem.shape.dtype == "fp32" or problem.lengths is not None:
        return None
    columns = -(-problem.shape.head_dim // 16) * 16
    return {"fp8": True, "head_dim": columns, "scale_block": random.choice((None, 16, 48, 128))}


def _codes(problem: Problem) -> Sizes:
    shape = problem.shape
    keys = (shape.batch, shape.kv_heads, shape.seqlen_k, shape.head_dim)
    scales = (*keys[:2], scale_blocks(shape.seqlen_k, shape.scale_block))
    found: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(("k", "v"), (keys, "uint8"))
    return found | dict.fromkeys(("k_scale", "v_scale"), (scales, "fp32"))


def _scales(walk: Walk) -> Mapping[str, int]:
    """A scale of each is read for 16 keys of every visit, however many keys share it."""
    return dict.fromkeys(("k_scale", "v_scale"), walk.loop.key_groups_visited(SCALE_UNIT) * SCALE_BYTES)


def _word(word: str, heads: Any) -> Fields:
    return {"fp8": True} if word == "e4m3" else {}


FP8 = Feature(
    "fp8",
    "K and V of e4m3",
    "k_scale",
    lambda p: p.shape.fp8,
    _fp8,
    "FP8",
    passes=("forward",),
    with_packed=False,
    registers=True,
    arrays=_codes,
    reads=_scales,
    sizes=lambda shape: dict.fromkeys(("k_scale", "v_scale"), shape.scale_bytes),
    spelled=(
        Spelling(
            "kv-dtype",
            "of k and v: as --dtype, or e4m3 with scales (the forward alone), or both as same,e4m3",
            _word,
            "words",
            ("same", "e4m3"),
            "same",
        ),
        Spelling(
            "scale-block",
            "keys that share a scale of e4m3, multiples of 16 (default: all)",
            lambda keys, heads: {"scale_block": keys},
            "numbers",
            beside=("kv-dtype", "e4m3"),
        ),
    ),
    shown={
        "e4m3 k and v: `k_scale`, `v_scale`": {"fp8": True},
        "e4m3 k and v: `scale_block`": {"fp8": True, "scale_block": 64},
    },
)

SAWTOOTH = Feature(
    "sawtooth",
    "a sawtooth",
    "order",
    lambda p: p.order == "sawtooth",
    lambda r, p: {"order": "sawtooth"},
    "SAWTOOTH",
    TENSOR_CORES,
    with_packed=False,
    spelled=(
        Spelling(
            "order",
            "of the walk, which decides what comes from HBM again: rows, sawtooth, or both as rows,sawtooth",
            lambda word, heads: {"order": word},
            "words",
            ORDERS,
            "rows",
        ),
    ),
    shown={'`order="sawtooth"`': {"order": "sawtooth"}},
)

DETERMINISTIC = Feature(
    "deterministic",
    "dq in a fixed order",
    "deterministic",
    lambda p: p.deterministic,
    lambda r, p: {"deterministic": True},
    families=TENSOR_CORES,
    optimistic=True,
    spelled=(Spelling("deterministic", "with auto: dq in a fixed order", lambda _, heads: {"deterministic": True}),),
    shown={"`deterministic`: dq in a fixed order": {"deterministic": True}},
)
