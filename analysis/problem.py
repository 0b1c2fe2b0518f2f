"""One attention problem: everything that decides what is computed and what is launched for it.

The operator, the kernels' drivers, predictions, random cases and the lists of what is compiled all
say their options as a :class:`Problem`; ``analysis.features`` has a row for each option. Values
that only arrays hold (a mask's bits, a bias' numbers) are no part of it, but for the block mask,
which decides what is walked.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from analysis.algorithms import ORDERS
from analysis.arguments import flag, names, one_of, probability, real
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile, bias_elements
from analysis.tile_loop import BlockMask

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Problem:
    """One pass's problem, whichever algorithm solves it.

    Args:
        shape: sizes, type, causal mask, window and sinks, and whether k and v are e4m3. With
            ``lengths`` that of the packed arrays, (1, H, total, D).
        lengths: of packed sequences.
        scale: that scores are multiplied with; None: 1/sqrt(head_dim).
        key_mask: keys may be taken out, each item's own.
        block_mask: broadcasts to (B, H, blocks of rows, blocks of keys), True = computed; its
            blocks have the size of ``tile``.
        dropout_p: probability that a weight is dropped.
        softcap: the bound of scores capped by a tanh; True where its value does not matter.
        alibi: a distance times the head's slope is taken off the scores.
        bias: (items, heads) of a stored bias (items, heads, Nq, Nk), each 1 or as many as there
            are; None for no bias.
        bias_gradient: the backward makes the gradient of the bias too.
        sink_logits: a learned logit a head joins the softmax's denominator (attention sinks; not the
            first keys that a window leaves, ``shape.sinks``). sink_gradient: the backward makes
            their gradient.
        lse_gradient: the backward gets a gradient of the log-sum-exp.
        gradients: those the backward is asked for; dk and dv are made together, and with the
            gradient of a bias all three.
        tile: asked for by the caller; None: the kernels' own.
        order: of the walk, ``analysis.algorithms.ORDERS``.
        deterministic: dq is to be the same bit for bit in every run.

    Raises:
        ValueError, TypeError: for what contradicts itself, naming the values.
    """

    shape: AttentionShape
    lengths: Lengths | None = None
    scale: float | None = None
    key_mask: bool = False
    block_mask: BlockMask | None = field(default=None, compare=False)
    dropout_p: float = 0.0
    softcap: float | None = None
    alibi: bool = False
    bias: tuple[int, int] | None = None
    bias_gradient: bool = False
    sink_logits: bool = False
    sink_gradient: bool = False
    lse_gradient: bool = False
    gradients: Collection[str] = GRADIENTS
    tile: Tile | None = None
    order: str = "rows"
    deterministic: bool = False
    block_bits: bytes = field(default=b"", init=False, repr=False)
    """Of ``block_mask``, so that problems of different masks differ."""

    def __post_init__(self) -> None:
        def keep(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if not isinstance(self.shape, AttentionShape):
            raise TypeError(f"shape={self.shape!r} is a {type(self.shape).__name__}, not AttentionShape")
        if self.tile is not None and not isinstance(self.tile, Tile):
            raise TypeError(f"tile={self.tile!r} is a {type(self.tile).__name__}, not Tile or None")
        flags = ("key_mask", "alibi", "bias_gradient", "sink_logits", "sink_gradient", "lse_gradient", "deterministic")
        for name in flags:
            keep(name, flag(name, getattr(self, name)))
        if self.scale is not None:
            keep("scale", real("scale", self.scale))
        keep("dropout_p", probability("dropout_p", self.dropout_p))
        if isinstance(self.softcap, bool):
            keep("softcap", 1.0 if self.softcap else None)
        gradients = names("gradients", self.gradients)
        for each in gradients:
            one_of("gradients", each, GRADIENTS)
        keep("gradients", tuple(each for each in GRADIENTS if each in gradients))
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r} is not one of {', '.join(ORDERS)}")
        if self.lengths is not None:
            self.lengths.check(self.shape)
        if self.bias is not None:
            bias_elements(self.shape, self.bias)  # refuses another shape
        elif self.bias_gradient:
            raise ValueError("bias_gradient=True without a bias")
        if self.sink_gradient and not self.sink_logits:
            raise ValueError("sink_gradient=True without sink_logits")
        if self.block_mask is not None:
            if self.tile is None:
                raise ValueError("a block mask needs a tile: the size of its blocks")
            bits = np.ascontiguousarray(self.block_mask, dtype=bool)
            keep("block_bits", repr(bits.shape).encode() + np.packbits(bits).tobytes())

    @classmethod
    def of(cls, problem: Problem | AttentionShape, **changes: Any) -> Problem:
        """A problem, or a shape, with these fields changed."""
        if not isinstance(problem, Problem):
            return cls(problem, **changes)
        return replace(problem, **changes) if changes else problem

    @property
    def padded(self) -> Problem:
        """As the kernels see it: head_dim a multiple of 8."""
        padded = self.shape.padded
        return self if padded is self.shape else replace(self, shape=padded)

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied with."""
        return 1.0 / math.sqrt(self.shape.head_dim) if self.scale is None else self.scale

    @property
    def windowed(self) -> bool:
        """Whether a window hides anything, in any of packed sequences; else it changes nothing."""
        if self.lengths is None:
            return self.shape.windowed
        return any(each.windowed for each in self.lengths.shapes(self.shape))

    @property
    def made(self) -> frozenset[str]:
        """The gradients that a backward makes, those that come along included."""
        asked = set(self.gradients)
        asked |= {"dk", "dv"} if {"dk", "dv"} & asked else set()
        return frozenset(GRADIENTS if self.bias_gradient else asked)
