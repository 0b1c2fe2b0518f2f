"""The Hopper form (``flash_forward_sm90.cu``, ``flash_backward_sm90.cu``): what TMA moves.

Forward, the bytes are those of ``analysis.sums.flash``: a tile that reaches past the last row moves
the rows that exist. Backward, the row statistics and dQ travel as plain blocks of memory rather
than tensors with an end, so they are stored for whole query tiles and a ragged tile moves
``block_m`` of them.
"""

from collections.abc import Mapping
from typing import Any

from analysis.feature import Walk
from analysis.features import with_options
from analysis.shapes import STAT_BYTES, AttentionShape, Tile
from analysis.sums import KernelBytes
from analysis.sums.flash import flash_forward
from analysis.tile_loop import tile_loop

FLAG_BYTES = 4
COUNTER_BYTES = 4
TURN_BYTES = 4


def flash_forward_sm90(shape: AttentionShape, tile: Tile, *, persistent: bool = False, **options: Any) -> KernelBytes:
    """O = softmax(QKᵀ)V, one thread block per query tile.

    persistent: one per multiprocessor, which takes its query tiles from a counter.
    """
    one_tile = flash_forward(shape, tile, **options)["flash_forward"]
    return _first_launches(shape, tile, one_tile, "", persistent)


def _first_launches(
    shape: AttentionShape, tile: Tile, one_tile: Mapping[tuple[str, str], int], suffix: str, persistent: bool
) -> KernelBytes:
    """The forward in either form. How many blocks share the tiles changes no byte: each block has
    a first tile without asking, and asks once more than it takes further ones."""
    if not persistent:
        return {f"flash_forward_sm90{suffix}": dict(one_tile)}
    query_tiles = shape.batch * shape.heads * tile_loop(shape, tile).query_tiles
    return {
        "flash_forward_sm90_clear_counter": {("tile_counter", "write"): COUNTER_BYTES},
        f"flash_forward_sm90_persistent{suffix}": {**one_tile, ("tile_counter", "atomic"): query_tiles * COUNTER_BYTES},
    }


def flash_forward_sm90_optimistic(
    shape: AttentionShape, tile: Tile, *, flagged: tuple[int, ...] = (), persistent: bool = False
) -> KernelBytes:
    """The forward that guesses the row maximum, and the launch that repairs what it flags.

    flagged: query tile of every tile that overflows, one entry for each batch and head it does so
    in. Each tile writes and reads a word of flag for each of its consumer warps of 16 rows.
    """
    loop = tile_loop(shape, tile)
    wrong = [i for i in flagged if not 0 <= i < loop.query_tiles]
    if wrong:
        raise ValueError(f"flagged tile {wrong[0]} is none of the {loop.query_tiles} query tiles")
    flags = shape.batch * shape.heads * loop.query_tiles * tile.block_m // 16 * FLAG_BYTES
    row = shape.head_dim * shape.itemsize
    query_rows = sum(int(loop.query_rows[i]) for i in flagged)
    seen = [int(loop.visits_of_query_tile[i]) for i in flagged]
    read_rows = sum(int(loop.query_rows[i]) for i, n in zip(flagged, seen, strict=True) if n)
    key_rows = sum(min(n * tile.block_n, shape.seqlen_k) for n in seen)
    first = {**flash_forward(shape, tile)["flash_forward"], ("flags", "write"): flags}
    return {
        **_first_launches(shape, tile, first, "_optimistic", persistent),
        "flash_forward_sm90_repair": {
            ("flags", "read"): flags,
            ("q", "read"): read_rows * row,
            ("k", "read"): key_rows * row,
            ("v", "read"): key_rows * row,
            ("out", "write"): query_rows * row,
            ("lse", "write"): query_rows * STAT_BYTES,
        },
    }


def flash_backward_sm90(
    shape: AttentionShape, tile: Tile, *, deterministic: bool = False, **options: Any
) -> KernelBytes:
    """dQ, dK, dV; lse2 is the log-sum-exp in base two, delta = rowsum(dO∘O).

    deterministic: key tiles take turns at a query tile, whose counter every visit reads once (a
    block that has to wait looks again, which no loop nest predicts) and writes once.
    options: of ``analysis.traffic.predict_traffic``.
    """
    walk = Walk("flash_backward_sm90", shape, tile, True, options)
    loop = walk.loop
    row = shape.head_dim * shape.itemsize
    accumulator_row = shape.head_dim * STAT_BYTES
    tiles_visited = loop.visits
    padded_visits = tiles_visited * tile.block_m
    padded_rows = shape.batch * shape.heads * loop.query_tiles * tile.block_m
    sums: dict[str, dict[tuple[str, str], int]] = {
        "flash_backward_sm90_preprocess": {
            ("out", "read"): shape.query_bytes,
            ("dout", "read"): shape.query_bytes,
            ("lse", "read"): shape.row_bytes,
            ("lse2", "write"): padded_rows * STAT_BYTES,
            ("delta", "write"): padded_rows * STAT_BYTES,
            ("dq_accum", "write"): padded_rows * accumulator_row,
        },
        "flash_backward_sm90": {
            ("k", "read"): loop.key_rows_with_a_visit * row,
            ("v", "read"): loop.key_rows_with_a_visit * row,
            ("q", "read"): loop.query_rows_visited * row,
            ("dout", "read"): loop.query_rows_visited * row,
            ("lse2", "read"): padded_visits * STAT_BYTES,
            ("delta", "read"): padded_visits * STAT_BYTES,
            ("dq_accum", "atomic"): padded_visits * accumulator_row,
            ("dk", "write"): shape.key_bytes,
            ("dv", "write"): shape.key_bytes,
        },
        "flash_backward_sm90_postprocess": {
            ("dq_accum", "read"): padded_rows * accumulator_row,
            ("dq", "write"): shape.query_bytes,
        },
    }
    if deterministic:
        turns = shape.batch * shape.heads * loop.query_tiles
        sums["flash_backward_sm90_preprocess"]["turns", "write"] = turns * TURN_BYTES
        for direction in ("read", "write"):
            sums["flash_backward_sm90"]["turns", direction] = tiles_visited * TURN_BYTES
    return with_options(sums, walk)
