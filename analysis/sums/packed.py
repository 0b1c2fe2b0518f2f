"""Packed sequences: the sum over sequences, and what the tables of their starts cost.

A block that works on a tile of a sequence moves what it would if the sequence were alone, so every
tensor's bytes are those of ``analysis.sums.flash``, added up. Two things come beside that:

* rows that meet nothing, of sequences without keys or without queries: zeros are written, and the
  kernels that go row by row touch them like others;
* the tables: a block reads the two entries of ``cu_seqlens`` on the side that it has a tile of,
  and if the tile has rows, two on the other side. The grid is one of sequences of the longest
  length, so that blocks without rows read 8 bytes each. On Hopper tiles of all sequences are
  numbered, and whoever has a number searches for its sequence, three entries a step at most,
  and reads the two of either table, with rows or without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile
from analysis.sums import KernelBytes
from analysis.sums.flash import flash_forward
from analysis.sums.flash_sm90 import COUNTER_BYTES, flash_backward_sm90

ENTRY_BYTES = 4
"""Bytes of an entry of ``cu_seqlens_q`` or ``cu_seqlens_k``."""
_KEYS = frozenset({"k", "v", "dk", "dv"})
MAIN_BACKWARD_SM90 = "flash_backward_sm90"
TABLES = ("cu_seqlens_q", "cu_seqlens_k")
SumOf = Callable[..., KernelBytes]


def packed(
    sum_of: SumOf, shape: AttentionShape, lengths: Lengths, tile: Tile, pass_: str, dq_tile: Tile | None = None
) -> KernelBytes:
    """Bytes of a pass of the sm_80 kernels over packed sequences.

    sum_of: (shape, tile, block_mask=None) → bytes of the pass for a batch of equal sequences.
    shape: (1, H, total, D). dq_tile: of the second pass of the split backward.
    """
    return _added(
        [
            *(sum_of(each, tile) for each in lengths.shapes(shape)),
            _unseen(sum_of, shape, lengths, tile),
            _tables(shape, lengths, tile, pass_, dq_tile),
        ]
    )


def packed_sm90(shape: AttentionShape, lengths: Lengths, tile: Tile) -> KernelBytes:
    """Bytes of the Hopper forward over packed sequences: what each moves alone is what the sm_80
    form does (``analysis.sums.flash_sm90``), boxes of TMA ending where the sequence does."""
    parts = [flash_forward(each, tile) for each in lengths.shapes(shape)]
    parts.append(_unseen(flash_forward, shape, lengths, tile))
    parts.append({"flash_forward": _found(lengths.queries, tile.block_m, TABLES, shape.heads)})
    numbers = lengths.numbered_tiles(tile.block_m)
    return {
        "flash_forward_sm90_clear_counter": {("tile_counter", "write"): COUNTER_BYTES},
        "flash_forward_sm90_persistent": {
            **_added(parts)["flash_forward"],
            ("tile_counter", "atomic"): shape.heads * numbers * COUNTER_BYTES,
        },
    }


def packed_backward_sm90(
    shape: AttentionShape, lengths: Lengths, tile: Tile, *, deterministic: bool, lse_gradient: bool
) -> KernelBytes:
    """Bytes of the Hopper backward over packed sequences.

    The kernels before and after it move rows of sequences without keys too; keys of those without
    queries are written. Blocks of all three look for their sequence.
    """
    options = {"deterministic": deterministic, "lse_gradient": lse_gradient}
    parts = [flash_backward_sm90(each, tile, **options) for each in lengths.shapes(shape)]
    pairs = list(zip(lengths.queries, lengths.keys, strict=True))
    for queries, keys in pairs:
        if queries and not keys:
            rows = replace(shape, seqlen_q=queries, seqlen_k=1, causal=False)
            moved = flash_backward_sm90(rows, tile, **options)
            parts.append({name: of for name, of in moved.items() if name != MAIN_BACKWARD_SM90})
    unseen = sum(keys for queries, keys in pairs if not queries)
    gradient = shape.kv_heads * unseen * shape.head_dim * shape.itemsize
    main = {("dk", "write"): gradient, ("dv", "write"): gradient}
    parts.append({MAIN_BACKWARD_SM90: main})
    # A block of the preprocess has 128 threads, of which a row takes one for 8 elements.
    a_tile = tile.block_m * shape.head_dim // (8 * 128)
    for kernel, own, block, tables, blocks in (
        ("_preprocess", lengths.queries, tile.block_m, TABLES, shape.heads * a_tile),
        ("", lengths.keys, tile.block_n, TABLES[::-1], shape.kv_heads),
        ("_postprocess", lengths.queries, tile.block_m, TABLES, shape.heads),
    ):
        parts.append({MAIN_BACKWARD_SM90 + kernel: _found(own, block, tables, blocks)})
    return _added(parts)


def _found(own: Sequence[int], block: int, tables: tuple[str, str], times: int) -> dict[tuple[str, str], int]:
    """Bytes of the tables where each number is searched ``times`` times. tables: of the side that
    the numbers are of, and of the other."""
    entries, numbers = _searched(own, block)
    once = 2 * ENTRY_BYTES * numbers
    found = zip(tables, (entries * ENTRY_BYTES + once, once), strict=True)
    return {(name, "read"): times * n for name, n in found}


def _searched(own: Sequence[int], block: int) -> tuple[int, int]:
    """Entries that the numbers of a head read together to find their sequences, and how many
    numbers there are (``sequence_tile`` of ``include/packed_sm90.cuh``)."""
    starts = np.concatenate(([0], np.cumsum(own, dtype=np.int64)))
    first = starts // block + np.arange(len(starts))
    number = np.arange(first[-1])
    at, end = np.zeros_like(number), np.full_like(number, len(own))
    read = 0
    while (searching := end - at > 1).any():
        quarter, lowest = -(-(end - at) // 4), at
        for i in (1, 2, 3):
            begin = lowest + i * quarter
            looked_at = searching & (begin < end)
            read += int(looked_at.sum())
            at = np.where(looked_at & (first[np.minimum(begin, len(own))] <= number), begin, at)
        end = np.minimum(at + quarter, end)
    return read, len(number)


def _added(parts: Iterable[KernelBytes]) -> dict[str, dict[tuple[str, str], int]]:
    total: dict[str, dict[tuple[str, str], int]] = {}
    for part in parts:
        for kernel, entries in part.items():
            into = total.setdefault(kernel, {})
            for key, count in entries.items():
                into[key] = into.get(key, 0) + count
    return total


def _unseen(sum_of: SumOf, shape: AttentionShape, lengths: Lengths, tile: Tile) -> KernelBytes:
    """Queries of sequences without keys, and keys of those without queries: what is moved of rows
    that a mask leaves nothing of."""
    pairs = list(zip(lengths.queries, lengths.keys, strict=True))
    queries = sum(q for q, k in pairs if not k)
    keys = sum(k for q, k in pairs if not q)
    if not queries and not keys:
        return {}
    rows = replace(shape, batch=1, seqlen_q=max(queries, 1), seqlen_k=max(keys, 1), causal=False, window=(None, None))
    nothing = np.zeros((1, 1, 1, 1), dtype=bool)
    return {
        kernel: {
            (tensor, way): count
            for (tensor, way), count in entries.items()
            if tensor != "block_mask" and (keys if tensor in _KEYS else queries)
        }
        for kernel, entries in sum_of(rows, tile, block_mask=nothing).items()
    }


def _tables(shape: AttentionShape, lengths: Lengths, tile: Tile, pass_: str, dq_tile: Tile | None) -> KernelBytes:
    if pass_ == "forward":
        return {"flash_forward": _entries(lengths.queries, shape.heads, tile.block_m, TABLES)}
    found = {"flash_backward": _entries(lengths.keys, shape.kv_heads, tile.block_n, TABLES[::-1])}
    if dq_tile is not None:
        found["flash_backward_dq"] = _entries(lengths.queries, shape.heads, dq_tile.block_m, TABLES)
    return found


def _entries(own: Sequence[int], heads: int, block: int, tables: tuple[str, str]) -> dict[tuple[str, str], int]:
    """tables: of the side that a block has a tile of, and of the other."""
    tiles = [-(-rows // block) for rows in own]
    blocks = len(tiles) * max(tiles, default=0)
    return {
        (tables[0], "read"): 2 * ENTRY_BYTES * heads * blocks,
        (tables[1], "read"): 2 * ENTRY_BYTES * heads * sum(tiles),
    }


def table_bytes(lengths: Lengths) -> int:
    """Size of one table."""
    return ENTRY_BYTES * (lengths.sequences + 1)


def working_blocks(lengths: Lengths, shape: AttentionShape, tile: Tile, *, keys_outside: bool) -> int:
    """Blocks of a kernel that have rows; keys_outside: a block has a key tile, not a query tile."""
    if keys_outside:
        return shape.kv_heads * sum(-(-rows // tile.block_n) for rows in lengths.keys)
    return shape.heads * sum(-(-rows // tile.block_m) for rows in lengths.queries)
