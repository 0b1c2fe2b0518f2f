"""Which tiles a tiled attention kernel visits: the double loop every traffic sum runs over.

Sequences are cut into Tr = ceil(Nq / block_m) query tiles and Tc = ceil(Nk / block_n) key tiles;
the last of each may be ragged and counts with the rows it really has. Under the causal mask and a
window a pair of tiles is visited when at least one (query, key) pair in it is visible; under a
block mask when its block is also set.

The sums never need the Tr × Tc table of visited pairs, only its row and column totals: how many
key tiles a query tile visits, and how many query tiles visit a key tile. Without a block mask that
keeps a prediction for a million tokens as cheap as one for a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from analysis.shapes import AttentionShape, Tile
from analysis.window import Window

Counts = npt.NDArray[np.int64]
BlockMask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TileLoop:
    """The tiles of a head and how often each is visited.

    Without a block mask all heads are alike: the visit arrays have one dimension, and ``copies``
    (batch · heads) says how many heads they stand for. With one, they have leading dimensions
    (B, H) and ``copies`` is 1. Likewise ``kv_copies`` for ``key_tile_met``, per key/value head.
    """

    query_rows: Counts
    """(Tr,) rows of query tile i."""
    key_rows: Counts
    """(Tc,) rows of key tile j."""
    visits_of_query_tile: Counts
    """(…, Tr) number of key tiles that query tile i meets."""
    visits_of_key_tile: Counts
    """(…, Tc) number of query tiles that key tile j meets."""
    key_tile_met: BlockMask
    """(…, Tc) whether any head of the group has a query tile that meets key tile j."""
    pairs_left_by_causal: int
    """Tile pairs of one head before a block mask is looked at."""
    elements_left_by_causal: int
    """(query, key) pairs inside them, visible or not; ragged tiles with their real rows."""
    copies: int
    kv_copies: int

    @property
    def query_tiles(self) -> int:
        """The papers' Tr."""
        return len(self.query_rows)

    @property
    def key_tiles(self) -> int:
        """The papers' Tc."""
        return len(self.key_rows)

    # The totals below are over all batches and heads.

    @property
    def visits(self) -> int:
        """Pairs of tiles that are visited."""
        return self.copies * int(self.visits_of_query_tile.sum())

    @property
    def query_tiles_with_a_visit(self) -> int:
        """Query tiles that visit a key tile."""
        return self.copies * int((self.visits_of_query_tile > 0).sum())

    @property
    def query_rows_visited(self) -> int:
        """Rows moved when a query tile is moved once per visit."""
        return self.copies * int((self.visits_of_query_tile * self.query_rows).sum())

    @property
    def key_rows_visited(self) -> int:
        """Rows moved when a key tile is moved once per visit."""
        return self.copies * int((self.visits_of_key_tile * self.key_rows).sum())

    def key_groups_visited(self, keys: int) -> int:
        """Groups of ``keys`` neighbouring keys moved when a key tile is moved once per visit; a
        tile is whole groups, but for the last one's end."""
        groups = -(-self.key_rows // keys)
        return self.copies * int((self.visits_of_key_tile * groups).sum())

    @property
    def query_rows_with_a_visit(self) -> int:
        """Rows moved when a query tile is moved once, and only if it has a visit at all."""
        return self.copies * int(((self.visits_of_query_tile > 0) * self.query_rows).sum())

    @property
    def key_rows_with_a_visit(self) -> int:
        """Rows moved when a key tile is moved once per key/value head, and only if visited."""
        return self.kv_copies * int((self.key_tile_met * self.key_rows).sum())


def tile_loop(
    shape: AttentionShape, tile: Tile, block_mask: BlockMask | None = None, mask_block: Tile | None = None
) -> TileLoop:
    """The loop over tiles: dense, causal or windowed with empty tiles left out, or block-sparse.

    block_mask: booleans that broadcast to (B, H, blocks of rows, blocks of keys).
    mask_block: the size of its blocks, a multiple of the tile; by default the tile.
    """
    head = _of_a_head(shape.visible, shape.seqlen_q, shape.seqlen_k, tile)
    if block_mask is None:
        batch = shape.batch
        return replace(head, copies=batch * shape.heads, kv_copies=batch * shape.kv_heads)
    tiles = tiles_met(shape, tile, block_mask, mask_block)
    of_key = tiles.sum(axis=2)
    by_group = of_key.reshape(shape.batch, shape.kv_heads, shape.group, head.key_tiles)
    return replace(
        head, visits_of_query_tile=tiles.sum(axis=3), visits_of_key_tile=of_key, key_tile_met=by_group.any(axis=2)
    )


@lru_cache(maxsize=1024)  # a prediction asks for one loop many times: bytes, operations, L2
def _of_a_head(visible: Window, seqlen_q: int, seqlen_k: int, tile: Tile) -> TileLoop:
    """The loop of one head without a block mask; its arrays cannot be written."""
    query_rows = _rows_per_tile(seqlen_q, tile.block_m)
    key_rows = _rows_per_tile(seqlen_k, tile.block_n)
    sinks, first, end = visible.key_tiles(tile.block_m, tile.block_n)
    first_query, end_query = visible.query_tiles(tile.block_m, tile.block_n)
    of_query, of_key = sinks + end - first, end_query - first_query
    row_at = np.minimum(np.arange(len(query_rows) + 1) * tile.block_m, seqlen_q)
    elements = int(key_rows @ (row_at[end_query] - row_at[first_query]))
    met = of_key > 0
    for shared in (query_rows, key_rows, of_query, of_key, met):
        shared.flags.writeable = False
    pairs = int(of_query.sum())
    return TileLoop(query_rows, key_rows, of_query, of_key, met, pairs, elements, 1, 1)


def tiles_met(shape: AttentionShape, tile: Tile, block_mask: BlockMask, mask_block: Tile | None = None) -> BlockMask:
    """(B, H, Tr, Tc): the pairs of tiles that the block mask, causal mask and window leave."""
    tiles = _per_tile(block_mask, shape, tile, mask_block or tile)
    sinks, first, end = shape.visible.key_tiles(tile.block_m, tile.block_n)
    j = np.arange(tiles.shape[3])
    return tiles & ((j < sinks[:, None]) | ((j >= first[:, None]) & (j < end[:, None])))


def _rows_per_tile(rows: int, block: int) -> Counts:
    tiles = -(-rows // block)
    sizes = np.full(tiles, block, dtype=np.int64)
    sizes[-1] = rows - (tiles - 1) * block
    return sizes


def _per_tile(mask: BlockMask, shape: AttentionShape, tile: Tile, block: Tile) -> BlockMask:
    """The block mask as (B, H, Tr, Tc)."""
    if block.block_m % tile.block_m or block.block_n % tile.block_n:
        raise ValueError(
            f"a mask block of {block.block_m} x {block.block_n} is not made of whole tiles of "
            f"{tile.block_m} x {tile.block_n}"
        )
    rows = -(-shape.seqlen_q // block.block_m)
    columns = -(-shape.seqlen_k // block.block_n)
    wanted = (shape.batch, shape.heads, rows, columns)
    try:
        whole = np.broadcast_to(np.asarray(mask, dtype=bool), wanted)
    except ValueError:
        raise ValueError(f"block_mask of shape {np.shape(mask)} does not broadcast to {wanted}") from None
    tr, tc = -(-shape.seqlen_q // tile.block_m), -(-shape.seqlen_k // tile.block_n)
    row_of = np.arange(tr) * tile.block_m // block.block_m
    column_of = np.arange(tc) * tile.block_n // block.block_n
    return whole[:, :, row_of][:, :, :, column_of]
