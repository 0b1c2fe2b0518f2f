"""Every option of attention, once: a row of :data:`FEATURES` is all that the package knows of it.

Whoever goes through options reads this table: drivers and dispatch (who takes what), the compiled
forms (macros), predictions (tensors that an option adds), lists of what is compiled, the coverage
page, random cases. What an option computes is in ``kernels/include``, what it costs in
``analysis.sums``, its definition in ``repro.attention.reference``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np

from analysis.algorithms import Family, find
from analysis.flops import TANH_SPECIALS
from analysis.packed import Lengths
from analysis.problem import Problem
from analysis.shapes import Tile

TENSOR_CORES = (Family.FLASH, Family.HOPPER)
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Feature:
    """One option.

    name: in ``kernels.flash_config.FlashConfig.features``; ``macro`` is its name in C.
    title: in messages.
    argument: of the drivers (``kernels.flash.Options``).
    used: whether a problem has it.
    drawn: fields of a problem that gets it, from a problem without; of the shape or its own. None
        where the option does not go with the problem.
    macro: "" for what no main kernel is compiled for.
    families: whose kernels take it.
    optimistic: whether the optimistic forward does, too.
    passes: that it is of.
    tensors: that it adds to the traffic of the sm_80 kernels, in the backward of a pass's own too.
    with_packed: whether it goes with packed sequences.
    specials: special-function operations that it adds to each score, by type.
    registers: whether it takes a warp the registers for a second group of rows.
    """

    name: str
    title: str
    argument: str
    used: Callable[[Problem], bool]
    drawn: Callable[[Random, Problem], Mapping[str, Any] | None]
    macro: str = ""
    families: tuple[Family, ...] = (Family.FLASH,)
    optimistic: bool = False
    passes: tuple[str, ...] = PASSES
    tensors: tuple[str, ...] = ()
    with_packed: bool = True
    specials: Mapping[str, int] = field(default_factory=dict)
    registers: bool = False

    def taken(self, algorithm: str, pass_: str) -> bool:
        """Whether the kernels of an algorithm's pass take it, by itself."""
        chosen = find(algorithm)
        if pass_ not in self.passes or chosen.family not in self.families:
            return False
        return self.optimistic or not (chosen.optimistic and pass_ == "forward")

    def draw(self, random: Random, problem: Problem) -> Problem | None:
        """The problem with this option, or None where the two do not go together."""
        if not self.with_packed and problem.lengths is not None:
            return None
        changes = self.drawn(random, problem)
        if changes is None:
            return None
        own = {name: value for name, value in changes.items() if hasattr(Problem, name)}
        of_shape = {name: value for name, value in changes.items() if name not in own}
        return replace(problem, shape=replace(problem.shape, **of_shape), **own)


def _window(random: Random, problem: Problem) -> Mapping[str, Any]:
    sides = (None, 0, 1, 15, 16, 64, random.randrange(200))
    window = (random.choice(sides), random.choice(sides))
    return {"window": window, "sinks": random.choice((0, 0, 1, 4, 70))}


def _block_mask(random: Random, problem: Problem) -> Mapping[str, Any] | None:
    shape, tile = problem.shape, problem.tile
    tile = tile or random.choice((Tile(64, 64), Tile(32, 64), Tile(16, 16)))
    blocks = (-(-shape.seqlen_q // tile.block_m), -(-shape.seqlen_k // tile.block_n))
    numbers = np.random.default_rng(random.randrange(2**31))
    bits = numbers.random((shape.batch, shape.heads, *blocks)) < random.choice((0.2, 0.6, 1.0))
    return {"block_mask": bits, "tile": tile}


def _bias(random: Random, problem: Problem) -> Mapping[str, Any]:
    shape = problem.shape
    return {"bias": (random.choice((1, shape.batch)), random.choice((1, shape.heads)))}


def _fp8(random: Random, problem: Problem) -> Mapping[str, Any] | None:
    if problem.shape.dtype == "fp32" or problem.lengths is not None:
        return None
    columns = -(-problem.shape.head_dim // 16) * 16
    return {"fp8": True, "head_dim": columns, "scale_block": random.choice((None, 16, 48, 128))}


def _packed(random: Random, problem: Problem) -> Mapping[str, Any] | None:
    others = (FEATURES[name] for name in features_of(problem))
    if not all(each.with_packed for each in others):
        return None
    edges = (0, 1, 17, 64, 100)
    queries = (1, *(random.choice(edges) for _ in range(random.choice((0, 1, 2, 7)))))
    keys = tuple(random.choice((rows, *edges)) if at else 1 for at, rows in enumerate(queries))
    lengths = Lengths(queries, keys)
    size = {"batch": 1, "seqlen_q": lengths.total_q, "seqlen_k": lengths.total_k}
    return {"lengths": lengths, **size}


_ALL = (
    Feature(
        "causal",
        "a causal mask",
        "causal",
        lambda p: p.shape.causal,
        lambda r, p: {"causal": True},
        "CAUSAL",
        tuple(Family),
        optimistic=True,
    ),
    Feature(
        "key_mask",
        "a key mask",
        "key_mask",
        lambda p: p.key_mask,
        lambda r, p: {"key_mask": True},
        "KEY_MASK",
        tensors=("key_mask",),
        with_packed=False,
        registers=True,
    ),
    Feature(
        "dropout",
        "dropout",
        "dropout_p",
        lambda p: p.dropout_p > 0.0,
        lambda r, p: {"dropout_p": r.choice((0.1, 0.5, 1.0))},
        "DROPOUT",
        registers=True,
    ),
    Feature(
        "block_mask",
        "a block mask",
        "block_mask",
        lambda p: p.block_mask is not None,
        _block_mask,
        "BLOCK_SPARSE",
        tensors=("block_mask",),
        with_packed=False,
        registers=True,
    ),
    Feature("window", "a window", "window", lambda p: p.windowed, _window, "WINDOW", TENSOR_CORES, registers=True),
    Feature(
        "softcap",
        "a softcap",
        "softcap",
        lambda p: p.softcap is not None,
        lambda r, p: {"softcap": r.choice((0.5, 5.0, 50.0))},
        "SOFTCAP",
        TENSOR_CORES,
        specials=TANH_SPECIALS,
        registers=True,
    ),
    Feature(
        "alibi",
        "ALiBi",
        "alibi_slopes",
        lambda p: p.alibi,
        lambda r, p: {"alibi": True},
        "ALIBI",
        TENSOR_CORES,
        tensors=("alibi_slopes",),
        registers=True,
    ),
    Feature(
        "bias",
        "a bias",
        "bias",
        lambda p: p.bias is not None,
        _bias,
        "BIAS",
        tensors=("bias",),
        with_packed=False,
        registers=True,
    ),
    Feature(
        "fp8",
        "K and V of e4m3",
        "k_scale",
        lambda p: p.shape.fp8,
        _fp8,
        "FP8",
        passes=("forward",),
        tensors=("k_scale", "v_scale"),
        with_packed=False,
        registers=True,
    ),
    Feature(
        "packed",
        "packed sequences",
        "packed",
        lambda p: p.lengths is not None,
        _packed,
        "PACKED",
        TENSOR_CORES,
        tensors=("cu_seqlens_q", "cu_seqlens_k"),
    ),
    Feature(
        "sawtooth",
        "a sawtooth",
        "order",
        lambda p: p.order == "sawtooth",
        lambda r, p: {"order": "sawtooth"},
        "SAWTOOTH",
        TENSOR_CORES,
        with_packed=False,
    ),
    Feature(
        "bias_gradient",
        "the gradient of a bias",
        "dbias",
        lambda p: p.bias_gradient,
        lambda r, p: None if p.bias is None else {"bias_gradient": True},
        passes=("backward",),
        tensors=("dbias",),
        with_packed=False,
    ),
    Feature(
        "lse_gradient",
        "a gradient of lse",
        "dlse",
        lambda p: p.lse_gradient,
        lambda r, p: {"lse_gradient": True},
        families=TENSOR_CORES,
        optimistic=True,
        passes=("backward",),
        tensors=("dlse",),
    ),
    Feature(
        "deterministic",
        "dq in a fixed order",
        "deterministic",
        lambda p: p.deterministic,
        lambda r, p: {"deterministic": True},
        families=TENSOR_CORES,
        optimistic=True,
    ),
)

FEATURES: Mapping[str, Feature] = MappingProxyType({each.name: each for each in _ALL})
"""Name -> option, in the order that messages name them in."""


def features_of(problem: Problem) -> frozenset[str]:
    """Names of the options that a problem has."""
    return frozenset(name for name, each in FEATURES.items() if each.used(problem))


def specials_of(problem: Problem) -> int:
    """Special-function operations that a problem's options add to each score."""
    dtype = problem.shape.dtype
    return sum(FEATURES[name].specials.get(dtype, 0) for name in features_of(problem))


def draw(random: Random, problem: Problem, chance: float = 0.25) -> Problem:
    """The problem with each option that goes with those before it, by ``chance``."""
    for each in _ALL:
        if random.random() < chance:
            problem = each.draw(random, problem) or problem
    return problem
