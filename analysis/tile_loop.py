"""Which tiles a tiled attention kernel visits: the double loop every traffic sum runs over.

Sequences are cut into Tr = ceil(Nq / block_m) query tiles and Tc = ceil(Nk / block_n) key tiles;
the last of each may be ragged and counts with the rows it really has. Under the causal mask a
pair of tiles is visited when at least one (query, key) pair in it is visible.

The sums never need the Tr × Tc table of visited pairs, only its row and column totals: how many
key tiles a query tile visits, and how many query tiles visit a key tile. That keeps a prediction
for a million tokens as cheap as one for a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.shapes import AttentionShape, Tile

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TileLoop:
    """The tiles of one head and how often each is visited."""

    query_rows: Counts
    """(Tr,) rows of query tile i."""
    key_rows: Counts
    """(Tc,) rows of key tile j."""
    visits_of_query_tile: Counts
    """(Tr,) number of key tiles that query tile i meets."""
    visits_of_key_tile: Counts
    """(Tc,) number of query tiles that key tile j meets."""

    @property
    def query_tiles(self) -> int:
        """The papers' Tr."""
        return len(self.query_rows)

    @property
    def key_tiles(self) -> int:
        """The papers' Tc."""
        return len(self.key_rows)

    @property
    def query_rows_visited(self) -> int:
        """Rows moved when a query tile is moved once per visit."""
        return int(self.query_rows @ self.visits_of_query_tile)

    @property
    def key_rows_visited(self) -> int:
        """Rows moved when a key tile is moved once per visit."""
        return int(self.key_rows @ self.visits_of_key_tile)

    @property
    def query_rows_with_a_visit(self) -> int:
        """Rows moved when a query tile is moved once, and only if it has a visit at all."""
        return int(self.query_rows[self.visits_of_query_tile > 0].sum())

    @property
    def key_rows_with_a_visit(self) -> int:
        """Rows moved when a key tile is moved once, and only if it has a visit at all."""
        return int(self.key_rows[self.visits_of_key_tile > 0].sum())


def tile_loop(shape: AttentionShape, tile: Tile) -> TileLoop:
    """The dense or causal loop over tiles, causal tiles with nothing visible left out."""
    query_rows = _rows_per_tile(shape.seqlen_q, tile.block_m)
    key_rows = _rows_per_tile(shape.seqlen_k, tile.block_n)
    tr, tc = len(query_rows), len(key_rows)
    if not shape.causal:
        return TileLoop(query_rows, key_rows, np.full(tr, tc), np.full(tc, tr))

    offset = shape.seqlen_k - shape.seqlen_q
    # The last row of a query tile sees the most keys; those keys are the first ones.
    last_query = np.cumsum(query_rows) - 1
    keys_seen = np.clip(last_query + offset + 1, 0, shape.seqlen_k)
    visits_of_query_tile = -(-keys_seen // tile.block_n)

    # The first key of a key tile is seen from query `first_query` on, to the end.
    first_key = np.arange(tc) * tile.block_n
    first_query = np.maximum(0, first_key - offset)
    visits_of_key_tile = np.where(first_query < shape.seqlen_q, tr - first_query // tile.block_m, 0)
    return TileLoop(query_rows, key_rows, visits_of_query_tile, visits_of_key_tile)


def _rows_per_tile(rows: int, block: int) -> Counts:
    tiles = -(-rows // block)
    sizes = np.full(tiles, block, dtype=np.int64)
    sizes[-1] = rows - (tiles - 1) * block
    return sizes
