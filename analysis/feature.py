"""What a row of ``analysis.features`` says of an option, and what its formulas are given.

Formulas of the reference work on arrays of the caller's library (torch's in
``repro.attention.reference``): operators and methods, so that nothing is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any, NamedTuple, TypeAlias

from analysis.algorithms import Family, find
from analysis.flops import pairs_in_blocks
from analysis.problem import Problem
from analysis.shapes import AttentionShape, KernelBytes, Tile
from analysis.tile_loop import BlockMask, TileLoop, tile_loop

PASSES = ("forward", "backward")
KERNELS = ("forward", "backward", "backward-dq")
"""Those of the sm_80 family that make scores; the last is the split backward's second pass."""
TENSOR_CORES = (Family.FLASH, Family.HOPPER)
"""Kernels that walk tiles on tensor cores, of either generation."""
Fields: TypeAlias = Mapping[str, Any]
"""Of a problem or of its shape, by name."""
Given: TypeAlias = Mapping[str, Any]
"""Arguments of ``repro.flash_attention`` by name, and ``keep`` (which weights dropout leaves) and
``block`` (the size of a block mask's blocks)."""
Sizes: TypeAlias = Mapping[str, tuple[tuple[int, ...], str]]
"""Arrays: name -> shape, type."""


class Pairs(NamedTuple):
    """All pairs of a query with a key: arrays that broadcast to (Nq, Nk).

    diagonal: (Nq, 1), the key i + Nk - Nq of query i. keys: (1, Nk).
    """

    diagonal: Any
    keys: Any


@dataclass(frozen=True)
class Walk:
    """One kernel's walk over tiles, as the bytes of options follow from it.

    entry: the kernel's name. keys_outside: a block has a key tile and visits query tiles.
    options: of the sum (``analysis.traffic.predict_traffic``).
    """

    entry: str
    shape: AttentionShape
    tile: Tile
    keys_outside: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block_mask(self) -> BlockMask | None:
        """Bits of the block mask, None without one."""
        return self.options.get("block_mask")

    @cached_property
    def loop(self) -> TileLoop:
        """The tiles that are visited."""
        return tile_loop(self.shape, self.tile, self.block_mask, self.options.get("mask_block"))

    @property
    def heads(self) -> int:
        """Query heads of all items."""
        return self.shape.batch * self.shape.heads

    @property
    def key_rows(self) -> int:
        """Rows of keys that are moved, with each visit or where keys are outside once."""
        return self.loop.key_rows_with_a_visit if self.keys_outside else self.loop.key_rows_visited

    @property
    def starts(self) -> int:
        """How often a block comes to another head."""
        return self.loop.visits if self.keys_outside else self.loop.query_tiles_with_a_visit

    @property
    def pairs(self) -> int:
        """Pairs that the masks leave, in all heads of all items: each lies in one visited tile."""
        mask = self.block_mask
        if mask is None:
            return self.heads * self.shape.visible_pairs
        return pairs_in_blocks(self.shape, mask, self.options.get("mask_block") or self.tile)


@dataclass(frozen=True)
class Spelling:
    """How ``python -m repro predict`` asks for an option.

    name: without its dashes.
    fields: what a value makes of a problem, beside the (batch, heads) that it is given.
    kind: "flag"; "word" of ``words``, or "words" and "numbers" for several; "windows"; "lengths".
    usual: of every problem that asks for nothing, as it is typed; None: not given.
    least: of numbers. short: a flag that stands for a word, and the word.
    beside: another spelling without which this one means nothing, and the word that asks for it.
    """

    name: str
    help: str
    fields: Callable[[Any, tuple[int, int]], Fields]
    kind: str = "flag"
    words: tuple[str, ...] = ()
    usual: str | None = None
    least: int = 1
    short: tuple[str, str] | None = None
    beside: tuple[str, str] | None = None


def _nothing(_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Feature:
    """One option.

    name: in ``kernels.flash_config.FlashConfig.features``; ``macro`` is its name in C.
    title: in messages.
    argument: of the drivers (``kernels.options.Options``).
    used: whether a problem has it.
    drawn: fields of a problem that gets it, from a problem without; of the shape or its own. None
        where the option does not go with the problem.
    macro: "" for what no main kernel is compiled for.
    families: whose kernels take it.
    optimistic: whether the optimistic forward does, too.
    passes: that it is of.
    with_packed: whether it goes with packed sequences.
    specials: special-function operations that it adds to each score, by type.
    registers: whether it takes a warp the registers for a second group of rows.
    kernels: that are compiled for it.
    arrays: that the drivers get of a problem that has it.
    reads: bytes that a kernel which makes scores reads for it, by tensor.
    beside: bytes that other kernels move for it, or that leave the one that makes scores.
    sizes: bytes of its tensors, of which kernels read more.
    given: arguments of the reference that it is, the first of which asks for it.
    seen: which pairs it leaves. scores: those that the softmax takes, and their derivative by those
        that it gets (None: 1). weights: what these are multiplied with.
    joins: logits that join the softmax's denominator beside the scores, one a head.
    errors: relative error of ``scores`` in the kernels of a type, where it is above the rounding.
    spelled: by the command line.
    shown: lines of the coverage page, and the fields of a problem that each asks for.
    """

    name: str
    title: str
    argument: str
    used: Callable[[Problem], bool]
    drawn: Callable[[Random, Problem], Fields | None]
    macro: str = ""
    families: tuple[Family, ...] = (Family.FLASH,)
    optimistic: bool = False
    passes: tuple[str, ...] = PASSES
    with_packed: bool = True
    specials: Mapping[str, int] = field(default_factory=dict)
    registers: bool = False
    kernels: tuple[str, ...] = KERNELS
    arrays: Callable[[Problem], Sizes] = _nothing
    reads: Callable[[Walk], Mapping[str, int]] | None = None
    beside: Callable[[Walk], KernelBytes] | None = None
    sizes: Callable[[AttentionShape], Mapping[str, int]] = _nothing
    given: tuple[str, ...] = ()
    seen: Callable[[Pairs, Given], Any] | None = None
    scores: Callable[[Any, Pairs, Given], tuple[Any, Any]] | None = None
    weights: Callable[[Given], Any] | None = None
    joins: Callable[[Given], Any] | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    spelled: tuple[Spelling, ...] = ()
    shown: Mapping[str, Fields] = field(default_factory=dict)

    @property
    def moves(self) -> bool:
        """Whether it moves bytes that depend on more than the shape."""
        return hasattr(Problem, self.name) and (self.reads is not None or self.beside is not None)

    def taken(self, algorithm: str, pass_: str) -> bool:
        """Whether the kernels of an algorithm's pass take it, by itself."""
        chosen = find(algorithm)
        if pass_ not in self.passes or chosen.family not in self.families:
            return False
        return self.optimistic or not (chosen.optimistic and pass_ == "forward")


def changed(problem: Problem, changes: Fields) -> Problem:
    """The problem with fields of its own or of its shape changed."""
    own = {name: value for name, value in changes.items() if hasattr(Problem, name)}
    of_shape = {name: value for name, value in changes.items() if name not in own}
    return replace(problem, shape=replace(problem.shape, **of_shape), **own)
