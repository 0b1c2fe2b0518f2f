"""The choice of tile on an A100, as the model of time sees it: each tile compiled and followed.

``python -m repro.timing tables tiles`` writes its table in docs/pages/time-validation.md. A minute;
needs NVRTC, nvdisasm and a C compiler, no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from analysis.flops import paper_flops
from analysis.shapes import AttentionShape, Tile
from kernels.timing.followed_warps import Kind, columns_of
from kernels.timing.records import Recorded
from kernels.timing.sm80_time import ON_A100, rounds_of
from repro.timing.ampere_validation import CLOCK, GPU

#: Tiles of a pass and head dimension, the default first.
TILES = {
    ("forward", 64): ((128, 64), (128, 128), (64, 128), (64, 64)),
    ("forward", 128): ((128, 64), (128, 128), (64, 64), (64, 32)),
    ("backward", 64): ((64, 128), (128, 128), (32, 128), (64, 64)),
    ("backward", 128): ((64, 128), (32, 128), (64, 64), (32, 64)),
}
ROUNDS = (2, 8)
SEQLENS = (2048, 16384)
TOKENS, HIDDEN = 16384, 2048


@dataclass(frozen=True)
class Choice:
    """A tile, the blocks and warps that an SM holds of it, and TFLOP/s by sequence length."""

    pass_: str
    head_dim: int
    tile: Tile
    blocks_per_sm: int
    warps: int
    rates: tuple[float, ...]


@cache
def choice(pass_: str, head_dim: int, block_m: int, block_n: int) -> Choice:
    """What the model says of a tile without a mask, fp16."""
    tile = Tile(block_m, block_n)
    kind = Kind(ON_A100, pass_, head_dim, causal=False, tile=tile)
    found = Recorded.read(
        {name: str(value) for name, value in columns_of(kind, ROUNDS).items()}
        | {"block_m": str(block_m), "block_n": str(block_n)}
    )
    rates = []
    for seqlen in SEQLENS:
        heads = HIDDEN // head_dim
        shape = AttentionShape(TOKENS // seqlen, heads, seqlen, seqlen, head_dim, dtype="fp16")
        clocks = found.clocks(rounds_of(pass_, tile, shape), GPU.sms)
        rates.append(paper_flops(shape, pass_) * CLOCK.hz / clocks / 1e12)
    return Choice(pass_, head_dim, tile, found.blocks_per_sm, kind.config.num_warps, tuple(rates))


def row(found: Choice) -> str:
    """A line of the table; rates are of the main kernel alone."""
    default = (found.tile.block_m, found.tile.block_n) == TILES[found.pass_, found.head_dim][0]
    tile = f"{found.tile.block_m} x {found.tile.block_n}{', default' if default else ''}"
    held = f"{found.blocks_per_sm} of {found.warps} warps"
    rates = " | ".join(f"{rate:.0f}" for rate in found.rates)
    return f"| {found.pass_} d{found.head_dim} | {tile} | {held} | {rates} |"


def table() -> str:
    """All tiles."""
    lines = ["| kernel | tile | blocks an SM holds | N = 2,048 | N = 16,384 |", "|---|---|---|---|---|"]
    for (pass_, head_dim), tiles in TILES.items():
        lines += [row(choice(pass_, head_dim, *tile)) for tile in tiles]
    return "\n".join(lines)
