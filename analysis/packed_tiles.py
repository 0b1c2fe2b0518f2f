"""The tile for sequences of many lengths: what it loads again beside what it multiplies in vain.

A larger query tile reads K and V less often. But the last tile of a sequence of n rows multiplies
Br rows and not the n mod Br that it has, and of packed sequences every one has a last tile. Bytes
alone would ask for tiles as tall as the longest sequence, products alone for the smallest.
"""

from __future__ import annotations

from analysis.flops import products
from analysis.hardware import Gpu
from analysis.packed import Lengths, summed
from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from analysis.tiles import candidates
from analysis.traffic import predict_traffic


def multiplied_pairs(shape: AttentionShape, lengths: Lengths, tile: Tile) -> int:
    """(query, key) pairs in the tiles visited, those of rows and keys that a tile lacks included:
    what the tensor cores multiply, all heads."""
    visits = summed(lambda each: tile_loop(each, tile).visits, shape, lengths)
    return visits * tile.block_m * tile.block_n


def packed_seconds(
    shape: AttentionShape, lengths: Lengths, tile: Tile, gpu: Gpu, pass_: str = "forward"
) -> float:
    """The larger of two times on all SMs: products at the tensor cores' rate, bytes at L2's.

    shape: (1, H, total, D). ValueError for a card whose bandwidth from L2 is not known.
    """
    bandwidth = gpu.l2_bandwidth_bytes_per_s
    if bandwidth is None:
        raise ValueError(f"the bandwidth of {gpu.name} between L2 and the SMs is not known")
    pairs = multiplied_pairs(shape, lengths, tile)
    flops = products(pass_) * 2 * pairs * shape.head_dim
    moved = predict_traffic("flash", shape, tile, pass_, lengths=lengths).total_bytes
    return max(flops / gpu.fp16_tensor_flops, moved / bandwidth)


def best_packed_tile(
    shape: AttentionShape, lengths: Lengths, gpu: Gpu, pass_: str = "forward"
) -> Tile:
    """Of the tiles that fit an SM, the one of least :func:`packed_seconds`; of equals the one that
    multiplies least, then the larger.

    Two ceilings and nothing else: that each step over keys rescales d numbers a row, which wants
    steps of 64 keys and more, is ``analysis.tiles.best_tile``'s.

    ValueError where nothing fits, or as :func:`packed_seconds` says.
    """
    fitting = [choice.tile for choice in candidates(shape, gpu, pass_)]
    if not fitting:
        raise ValueError(f"no tile of head_dim={shape.head_dim} fits {gpu.name}")
    return min(
        fitting,
        key=lambda tile: (
            packed_seconds(shape, lengths, tile, gpu, pass_),
            multiplied_pairs(shape, lengths, tile),
            -tile.block_m * tile.block_n,
        ),
    )
