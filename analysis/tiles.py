"""Choosing a tile from the size of on-chip memory: the paper's rule, the study notes', and ours.

All three answer the same question with different accounting, so they can be drawn on one axis and
held against an exhaustive measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from analysis.hardware import Gpu
from analysis.occupancy import MAX_REGISTERS_PER_THREAD, Occupancy, occupancy
from analysis.shapes import STAT_BYTES, AttentionShape, Tile
from analysis.traffic import predict_traffic


def paper_tile(head_dim: int, on_chip_elements: int) -> Tile:
    """Bc = ceil(M/4d), Br = min(Bc, d), with M in elements (FlashAttention 2022, Alg. 1, line 1).

    Four blocks of Bc·d or fewer elements (K, V, Q, O) share M; Br ≤ d keeps the Br × Bc scores
    within M as well. The released kernels used Br = 16 and Bc = 128 or 256 instead.
    """
    if head_dim < 1 or on_chip_elements < head_dim:
        raise ValueError(f"the rule needs d >= 1 and M >= d, got d={head_dim}, M={on_chip_elements}")
    block_n = -(-on_chip_elements // (4 * head_dim))
    return Tile(block_m=min(block_n, head_dim), block_n=block_n)


def study_note_tile(head_dim: int, sram_bytes: int) -> Tile:
    """The study notes' rule: b = min(floor(sqrt(SRAM / (3·d·4 B))), 128), rounded down to 32.

    Fault F7: it divides by the bytes of three rows of d numbers and then takes a root, as if a
    tile were b × b × d; a tile of Q, K and V is 3·b·d numbers and needs no root. So it asks for
    far smaller tiles than fit, and for none at all (zero, refused here) where the root is below 32.
    """
    side = math.isqrt(sram_bytes // (3 * head_dim * 4))
    block = min(side, 128) // 32 * 32
    if block == 0:
        raise ValueError(
            f"the rule gives a tile of 0 for d={head_dim} and {sram_bytes} bytes: "
            f"sqrt({sram_bytes} / {3 * head_dim * 4}) = {side} is below 32"
        )
    return Tile(block, block)


def study_note_tile_corrected(head_dim: int, sram_bytes: int) -> Tile:
    """The same budget without the root: 3·b·d fp32 numbers within SRAM, rounded down to 32."""
    block = sram_bytes // (3 * head_dim * 4) // 32 * 32
    if block == 0:
        raise ValueError(f"three tiles of 32 rows of {head_dim} do not fit {sram_bytes} bytes")
    return Tile(block, block)


@dataclass(frozen=True)
class Resources:
    """What one thread block of a kernel takes for a tile."""

    threads: int
    registers_per_thread: int
    shared_bytes: int


def forward_resources(tile: Tile, head_dim: int, itemsize: int, *, stages: int = 2) -> Resources:
    """Estimate for the tensor-core forward kernel: Q and ``stages`` of K and V in shared memory.

    A warp owns 16 or 32 query rows. Registers of a thread: its share of the fp32 accumulators O
    (block_m × d) and S (block_m × block_n), Q's fragments where a warp owns 16 rows, and 40 for
    everything else. A compiled kernel's own numbers are better where there are some.
    """
    rows_per_warp = 16 if tile.block_m <= 64 else 32
    warps = max(1, tile.block_m // rows_per_warp)
    threads = 32 * warps
    accumulators = tile.block_m * (head_dim + tile.block_n) // threads
    fragments = 16 * head_dim * itemsize // (4 * 32) if rows_per_warp == 16 else 0
    shared = (tile.block_m + 2 * stages * tile.block_n) * head_dim * itemsize
    return Resources(threads, accumulators + fragments + 40, shared)


def backward_resources(tile: Tile, head_dim: int, itemsize: int, *, stages: int = 1) -> Resources:
    """Estimate for the backward kernel: K, V and ``stages`` of Q and dO, dS and two rows.

    A warp owns 16 key rows. Registers: fp32 dK and dV (block_n × d each), Sᵀ and dPᵀ.
    """
    warps = max(1, tile.block_n // 16)
    threads = 32 * warps
    accumulators = tile.block_n * 2 * (head_dim + tile.block_m) // threads
    shared = 2 * (tile.block_n + stages * tile.block_m) * head_dim * itemsize
    shared += tile.block_m * tile.block_n * itemsize + 2 * tile.block_m * STAT_BYTES
    return Resources(threads, accumulators + 40, shared)


@dataclass(frozen=True)
class TileChoice:
    """A candidate tile with what decides about it."""

    tile: Tile
    traffic_bytes: int
    occupancy: Occupancy
    resources: Resources


BLOCKS = (16, 32, 64, 128, 256)
"""Candidate block sizes: what tensor-core fragments divide evenly."""


def candidates(
    shape: AttentionShape,
    gpu: Gpu,
    pass_: str = "forward",
    *,
    algorithm: str = "flash",
    resources: Callable[[Tile], Resources] | None = None,
    blocks: Iterable[int] = BLOCKS,
) -> list[TileChoice]:
    """Every tile that fits a block of this GPU, by predicted traffic, least first.

    resources: what a tile takes, ``forward_resources`` or ``backward_resources`` by default.
    Among tiles of equal traffic the one that fills more warps comes first, then the larger.
    """
    if pass_ not in ("forward", "backward"):
        raise ValueError(f"pass_={pass_!r} is neither 'forward' nor 'backward'")
    estimate = forward_resources if pass_ == "forward" else backward_resources
    blocks = tuple(blocks)
    found = []
    for tile in (Tile(m, n) for m in blocks for n in blocks):
        need = resources(tile) if resources else estimate(tile, shape.head_dim, shape.itemsize)
        if need.registers_per_thread > MAX_REGISTERS_PER_THREAD or need.threads > 1024:
            continue
        fit = occupancy(
            gpu, threads=need.threads, registers_per_thread=need.registers_per_thread, shared_bytes=need.shared_bytes
        )
        if fit.blocks_per_sm:
            traffic = predict_traffic(algorithm, shape, tile, pass_).total_bytes
            found.append(TileChoice(tile, traffic, fit, need))
    return sorted(found, key=lambda c: (c.traffic_bytes, -c.occupancy.warps_per_sm, -c.tile.block_m * c.tile.block_n))


def best_tile(
    shape: AttentionShape, gpu: Gpu, pass_: str = "forward", *, resources: Callable[[Tile], Resources] | None = None
) -> Tile:
    """Our rule: the least predicted SM-boundary traffic among tiles that keep an SM busy.

    Forward traffic, Nd·(2 + 2·Tr), depends on block_m alone, backward traffic on block_n, so alone
    it would ask for one huge side and a sliver for the other. Two conditions bound it:

    - two blocks per SM, so that one block's exponentials run under another's products;
    - an inner step of at least 64 (block_n forward, block_m backward): each step rescales or
      reduces d numbers a row against as many exponentials as the step is wide.

    Where no tile meets both, the first is given up, then the second halved. Raises ValueError
    where nothing fits.
    """
    found = candidates(shape, gpu, pass_, resources=resources)
    for blocks_per_sm, step in ((2, 64), (1, 64), (1, 32), (1, 16)):
        for choice in found:
            inner = choice.tile.block_n if pass_ == "forward" else choice.tile.block_m
            if choice.occupancy.blocks_per_sm >= blocks_per_sm and inner >= step:
                return choice.tile
    raise ValueError(f"no tile of head_dim={shape.head_dim} fits {gpu.name}")
