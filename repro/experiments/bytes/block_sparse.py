"""Block-sparse attention: traffic against the share of blocks that are computed.

FlashAttention 2022, §3.3, Prop. 4: Θ(Nd + N²d²·s/M) accesses with s the share of non-zero blocks,
so traffic is affine in s. Fig. 2 right shows the run time of that, N = 4096, forward and backward;
its records are ``fig2-right``. Patterns: blocks chosen at random, and the fixed butterfly (block
row i meets block columns i and i with one bit flipped), whose share falls as log₂(n) / n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from analysis.shapes import Tile
from repro.experiments import Cell, Context, Experiment, Row
from repro.experiments.shared.attention import cell, predicted_traffic, tile_of
from repro.experiments.shared.flash_run import counted, run

HEAD_DIM, TILE = 64, Tile(64, 64)
DENSITIES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
EXECUTED, PUBLISHED_LENGTH = 1024, 4096
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PASSES = ("forward", "backward")

Mask = NDArray[np.bool_]


def butterfly(blocks: int) -> Mask:
    """(blocks, blocks): True where i = j, or i and j differ in one bit (Dao et al. 2022, §3.3)."""
    i, j = np.ogrid[:blocks, :blocks]
    difference = i ^ j
    return (difference & (difference - 1)) == 0  # zero, or a power of two


def chosen(blocks: int, density: float) -> Mask:
    """(blocks, blocks) with round(density · blocks²) entries True, at random places."""
    mask = np.zeros(blocks * blocks, bool)
    order = np.random.default_rng(0).permutation(mask.size)
    mask[order[: round(density * mask.size)]] = True
    return mask.reshape(blocks, blocks)


def mask_of(one: Cell) -> Mask | None:
    """The block mask of a cell, None where it is dense."""
    blocks = math.ceil(int(one["seqlen_q"]) / TILE.block_m)
    if one["pattern"] == "dense":
        return None
    if one["pattern"] == "butterfly":
        return butterfly(blocks)
    return chosen(blocks, float(one["density"]))


def point(pattern: str, pass_: str, seqlen: int, density: float = 1.0) -> Cell:
    """One pass of one head."""
    if pattern == "butterfly":
        density = float(butterfly(math.ceil(seqlen / TILE.block_m)).mean())
    return cell("flash", pass_, TILE, seqlen=seqlen, head_dim=HEAD_DIM, pattern=pattern, density=density)


def cells() -> list[Cell]:
    """What is executed: the sweep over the density at one length, and the butterfly."""
    listed = []
    for pass_ in PASSES:
        listed += [point("random", pass_, EXECUTED, density) for density in DENSITIES]
        listed += [point("butterfly", pass_, seqlen) for seqlen in (512, EXECUTED)]
        listed += [point("dense", pass_, seqlen) for seqlen in (512, EXECUTED)]
    return listed


def predict(one: Cell) -> Iterator[Row]:
    """Exact sums over the blocks that are left."""
    mask = mask_of(one)
    options = {} if mask is None else {"block_mask": mask[None, None]}
    return predicted_traffic(one, **options)


def also() -> Iterator[Cell]:
    """The sums at the paper's length, and the butterfly at the lengths that are not executed."""
    for pass_ in PASSES:
        for density in DENSITIES:
            yield point("random", pass_, PUBLISHED_LENGTH, density)
        for seqlen in LENGTHS:
            if seqlen > EXECUTED:
                yield point("butterfly", pass_, seqlen)
                yield point("dense", pass_, seqlen)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """The kernels, executed and counted, and their error against float64."""
    return counted(run(one, context, tile=tile_of(one), block_mask=mask_of(one)))


EXPERIMENT = Experiment("block-sparse", cells, predict, measure, device="host", also=also, seconds=40, on_demand=True)
