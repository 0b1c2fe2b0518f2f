"""The experiment of sliding windows: what is executed moves what is predicted."""

from __future__ import annotations

import math

import pytest

from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from repro.experiments.bytes import sliding_window as experiment


@pytest.mark.parametrize("tile", experiment.TILES, ids=str)
def test_keys_of_a_query_tile_by_the_closed_form(tile: Tile) -> None:
    """Br + Bc ceil((w - 1) / Bc), once a window is not cut off by the first key."""
    for window in (1, 2, 16, 33, 64, 100, 128, 500):
        shape = AttentionShape(1, 1, 2048, 2048, 64, causal=True, window=(window - 1, 0))
        keys = tile_loop(shape, tile).visits_of_query_tile * tile.block_n
        wanted = tile.block_m + tile.block_n * math.ceil((window - 1) / tile.block_n)
        assert keys[-1] == keys[len(keys) // 2] == wanted
