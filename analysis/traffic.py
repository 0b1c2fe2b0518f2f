"""How many bytes an attention kernel moves, exactly, from its tile loop alone.

The FlashAttention paper (2022, §2.1 and §3.2) counts "HBM accesses" on a machine with two
levels: one small fast memory of M elements, one large slow memory. Whatever a thread block loads
comes from the slow memory, every time. On that machine a schedule of tiles fixes the traffic
completely, and this module adds it up: one sum per tensor and direction, with ragged last tiles
and skipped causal tiles counted as they are.

A GPU of today has an L2 cache between the two, so the one number becomes two:

``SM boundary``
    What thread blocks request: bytes that cross between L2 and the SMs. It depends only on the
    tile loop. It equals the paper's number, and it is what this module predicts, to the byte.

``HBM``
    What is left after L2 has served the re-reads it could hold. It is never more than the SM
    boundary's traffic and never less than touching each tensor once. ``analysis.hbm`` predicts it.

How a sum is made, for the forward pass with one 64 × 64 tile per step, fp16 and head_dim 64:
a tile of 64 rows is 64·64·2 = 8192 bytes. At N = 128 there are 2 query tiles and 2 key tiles.
Each query tile reads itself once and, for both key tiles, K and V: 2·(1 + 2·2)·8192 = 81 920
bytes. The causal mask lets the first query tile stop after one key tile: 65 536.

>>> from analysis.shapes import AttentionShape, Tile
>>> shape = AttentionShape(batch=1, heads=1, seqlen_q=128, seqlen_k=128, head_dim=64)
>>> predict_traffic("flash", shape, Tile(64, 64), "forward").read_bytes
81920

The tile loop is in ``analysis.tile_loop``, the sums in ``analysis.sums``: one short module for
standard attention, one for FlashAttention 2022, one for the form used since FlashAttention-2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from analysis import algorithms
from analysis.algorithms import Algorithm, DqSum, Family
from analysis.features import FEATURES, refused
from analysis.packed import Lengths
from analysis.problem import Problem
from analysis.shapes import AttentionShape, Tile
from analysis.sums import KernelBytes
from analysis.sums.flash import flash_backward, flash_backward_split, flash_forward
from analysis.sums.flash1 import flash1_backward, flash1_forward
from analysis.sums.flash_sm90 import flash_backward_sm90, flash_forward_sm90, flash_forward_sm90_optimistic
from analysis.sums.packed import packed, packed_backward_sm90, packed_sm90
from analysis.sums.standard import standard_backward, standard_forward

DIRECTIONS = ("read", "write", "atomic")
ROW_STATISTICS = frozenset({"lse", "delta", "dlse", "m", "l"})
"""Tensors of one fp32 number per query row."""


@dataclass(frozen=True)
class Traffic:
    """Bytes moved, per kernel, tensor and direction. Entries of zero bytes are left out.

    An atomic addition is sent once and nothing comes back, so it counts as written.
    """

    kernels: Mapping[str, Mapping[tuple[str, str], int]]

    def __post_init__(self) -> None:
        frozen = {}
        for kernel, entries in self.kernels.items():
            for (tensor, direction), count in entries.items():
                if direction not in DIRECTIONS:
                    raise ValueError(f"{kernel}/{tensor}: direction {direction!r}")
                if count < 0:
                    raise ValueError(f"{kernel}/{tensor}/{direction}: {count} bytes")
            kept = {key: int(count) for key, count in entries.items() if count}
            frozen[kernel] = MappingProxyType(kept)
        object.__setattr__(self, "kernels", MappingProxyType(frozen))

    @property
    def read_bytes(self) -> int:
        return self._total("read")

    @property
    def write_bytes(self) -> int:
        """Plain writes and atomic additions."""
        return self._total("write") + self._total("atomic")

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    def of_matrices(self) -> Traffic:
        """Without the fp32 row statistics, as the papers count: multiples of N·d and N²."""
        return Traffic(
            {
                kernel: {key: n for key, n in entries.items() if key[0] not in ROW_STATISTICS}
                for kernel, entries in self.kernels.items()
            }
        )

    def by_tensor(self) -> dict[tuple[str, str], int]:
        """Bytes per (tensor, direction), summed over kernels."""
        totals: dict[tuple[str, str], int] = {}
        for entries in self.kernels.values():
            for key, count in entries.items():
                totals[key] = totals.get(key, 0) + count
        return totals

    def __add__(self, other: Traffic) -> Traffic:
        merged: dict[str, dict[tuple[str, str], int]] = {}
        for part in (self, other):
            for kernel, entries in part.kernels.items():
                into = merged.setdefault(kernel, {})
                for key, count in entries.items():
                    into[key] = into.get(key, 0) + count
        return Traffic(merged)

    def _total(self, direction: str) -> int:
        return sum(count for (_, way), count in self.by_tensor().items() if way == direction)


def sum_of(algorithm: Algorithm, pass_: str) -> tuple[Callable[..., KernelBytes], dict[str, Any]]:
    """The sum of an algorithm's pass, and the keyword arguments that select a variant of it."""
    forward = pass_ == "forward"
    if algorithm.family is Family.STANDARD:
        return (standard_forward if forward else standard_backward), {}
    if algorithm.family is Family.FLASH1:
        return (flash1_forward if forward else flash1_backward), {"form": algorithm.form}
    if algorithm.family is Family.HOPPER:
        if forward:
            return (flash_forward_sm90_optimistic if algorithm.optimistic else flash_forward_sm90), {}
        return flash_backward_sm90, {"deterministic": algorithm.dq is DqSum.ORDERED}
    if forward:
        return flash_forward, {}
    if algorithm.dq is DqSum.SEPARATE_PASS:
        return flash_backward_split, {}
    return flash_backward, {"deterministic": algorithm.dq is DqSum.WORKSPACE}


def predict_traffic(algorithm: str, shape: AttentionShape, tile: Tile, pass_: str, **options: Any) -> Traffic:
    """SM-boundary traffic of one pass, exact to the byte.

    algorithm: a name of ``analysis.algorithms``; pass_: "forward" or "backward". Options, where the
    algorithm has them: those of ``analysis.features`` that move bytes, as a problem has them, with
    ``mask_block`` for the size of a block mask's blocks; dq_tile, persistent, flagged
    (``analysis.sums``); and lengths (``analysis.packed.Lengths``), with ``shape`` that of the
    packed arrays, (1, H, total, D).

    Raises ValueError for an unknown algorithm, pass or option, and for a shape that the
    algorithm does not handle.
    """
    if pass_ not in ("forward", "backward"):
        raise ValueError(f"pass_={pass_!r} is neither 'forward' nor 'backward'")
    bytes_of, variant = sum_of(algorithms.find(algorithm), pass_)
    of_shape = {"window": shape.windowed, "fp8": shape.fp8}
    why = refused(algorithm, pass_, [name for name, there in of_shape.items() if there])
    if why is not None:
        raise ValueError(f"the {pass_} of {why}: window={shape.window}, sinks={shape.sinks}, fp8={shape.fp8}")
    lengths: Lengths | None = options.pop("lengths", None)
    known = set(inspect.signature(bytes_of).parameters)
    if "options" in known:
        known |= {"mask_block", *_moving(algorithm, pass_)}
    if options.keys() - known or set(options) & set(variant):
        raise ValueError(f"{algorithm} {pass_} takes no option {', '.join(sorted(options))}")
    if lengths is None:
        return Traffic(bytes_of(shape, tile, **variant, **options))
    return Traffic(_packed(algorithm, shape, tile, pass_, lengths, {**variant, **options}))


def _moving(algorithm: str, pass_: str) -> list[str]:
    """Options that move bytes in a pass of an algorithm."""
    return [name for name, each in FEATURES.items() if each.moves and each.taken(algorithm, pass_)]


def traffic_options(problem: Problem, pass_: str) -> dict[str, Any]:
    """Those of :func:`predict_traffic` that say what a problem asks for: what moves bytes."""
    named = [each for each in FEATURES.values() if each.moves and pass_ in each.passes and each.used(problem)]
    options: dict[str, Any] = {each.name: getattr(problem, each.name) for each in named}
    if problem.block_mask is not None:
        options["mask_block"] = problem.tile
    if problem.lengths is not None:
        options["lengths"] = problem.lengths
    return options


def _packed(
    algorithm: str, shape: AttentionShape, tile: Tile, pass_: str, lengths: Lengths, options: Mapping[str, Any]
) -> KernelBytes:
    """ValueError where packed sequences do not go with the shape, the algorithm or an option."""
    lengths.check(shape)
    chosen = algorithms.find(algorithm)
    ordered = pass_ == "backward" and chosen.dq is DqSum.WORKSPACE
    hopper = chosen.family is Family.HOPPER and (pass_ == "backward" or not chosen.optimistic)
    if not hopper and (chosen.family is not Family.FLASH or ordered):
        raise ValueError(f"{algorithm} {pass_} takes no packed sequences: flash, flash-split do")
    asked = {**options, "fp8": shape.fp8, "window": any(each.windowed for each in lengths.shapes(shape))}
    asked = {name: value for name, value in asked.items() if value is not None and value is not False}
    alone = [each.argument for name, each in FEATURES.items() if name in asked and not each.with_packed]
    if alone:
        raise ValueError(f"packed sequences do not go with {', '.join(alone)}")
    if hopper:
        alone = [name for name in ("alibi", "window") if name in asked]
        if alone:
            raise ValueError(f"{algorithm}: packed sequences do not go with {', '.join(alone)}")
        if pass_ == "forward":
            return packed_sm90(shape, lengths, tile)
        return packed_backward_sm90(
            shape,
            lengths,
            tile,
            deterministic=options["deterministic"],
            lse_gradient=options.get("lse_gradient", False),
        )
    split = pass_ == "backward" and chosen.dq is DqSum.SEPARATE_PASS
    dq_tile = options.get("dq_tile", tile) if split else None
    of_equals = partial(sum_of(chosen, pass_)[0], **options)
    return packed(of_equals, shape, lengths, tile, pass_, dq_tile)
