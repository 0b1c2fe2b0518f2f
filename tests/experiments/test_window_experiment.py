"""The experiment of sliding windows: what is executed moves what is predicted."""

from __future__ import annotations

import math

import pytest

from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from figures.bytes import sliding_window as figure
from repro.experiments import Cell, Context, tidy
from repro.experiments.bytes import sliding_window as experiment


def by_tensor(rows: list[experiment.Record]) -> dict[tuple[str | None, ...], float | None]:
    """Bytes of each kernel, tensor and direction."""
    traffic = [row for row in rows if row.metric == "traffic_bytes"]
    return {(row.kernel, row.tensor, row.direction): row.value for row in traffic}


@pytest.mark.parametrize("way", ["window", "stored mask", "standard"])
@pytest.mark.parametrize("pass_", experiment.PASSES)
def test_a_cell_executed_moves_what_is_predicted(way: str, pass_: str) -> None:
    cell: Cell = experiment.point(way, pass_, 300, 40)
    measured = list(experiment.measure(cell, Context("host")))
    assert by_tensor(measured) == by_tensor(list(experiment.predict(cell)))
    errors = [row.value for row in measured if row.metric == "max_abs_error"]
    assert errors
    assert all(error is not None and error <= 5e-3 for error in errors)  # fp16, N(0, 1)


@pytest.mark.parametrize("tile", experiment.TILES, ids=str)
def test_keys_of_a_query_tile_by_the_closed_form(tile: Tile) -> None:
    """Br + Bc ceil((w - 1) / Bc), once a window is not cut off by the first key."""
    for window in (1, 2, 16, 33, 64, 100, 128, 500):
        shape = AttentionShape(1, 1, 2048, 2048, 64, causal=True, window=(window - 1, 0))
        keys = tile_loop(shape, tile).visits_of_query_tile * tile.block_n
        wanted = tile.block_m + tile.block_n * math.ceil((window - 1) / tile.block_n)
        assert keys[-1] == keys[len(keys) // 2] == wanted


def test_the_figure_is_drawn_with_and_without_records() -> None:
    frame = tidy(figure.EXPERIMENTS)
    drawing = figure.draw(frame)
    assert set(drawing.table["source"]) == {"predicted", "measured"}
    (claim,) = figure.verdicts(frame)
    assert claim.measured.endswith("worst +0.00%; 2.00")
    assert figure.draw(frame.iloc[:0]).table.empty
