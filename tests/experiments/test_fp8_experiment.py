"""The experiment of K and V in fp8: executed bytes are predicted ones; a block's scale helps."""

from __future__ import annotations

import pytest

from repro.experiments import Cell, Context
from repro.experiments.bytes import fp8_bytes as experiment


def cells_of(way: str, **wanted: object) -> list[Cell]:
    """Cells of a way with these fields."""
    return [
        cell for cell in experiment.cells() if cell["way"] == way and all(cell.get(n) == x for n, x in wanted.items())
    ]


def test_an_outlier_costs_others_with_a_scale_a_head_and_nothing_with_a_scale_a_block() -> None:
    found = {}
    for way in ("scale a head", "scale a block"):
        for size in (1, experiment.OUTLIERS[-1]):
            (cell,) = cells_of(way, outlier=size)
            (row,) = experiment.EXPERIMENT.measured(cell, Context("host"))
            assert row.value is not None
            found[way, size] = row.value
    large = experiment.OUTLIERS[-1]
    assert found["scale a block", large] == found["scale a block", 1]
    assert found["scale a head", large] > 5 * found["scale a block", large]
    assert found["scale a head", 1] == pytest.approx(found["scale a block", 1], rel=0.3)
