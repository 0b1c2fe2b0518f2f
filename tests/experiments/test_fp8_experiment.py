"""The experiment of K and V in fp8: executed bytes are predicted ones; a block's scale helps."""

from __future__ import annotations

import pytest

from figures.bytes import fp8_bytes as figure
from repro.experiments import Cell, Context, tidy
from repro.experiments.bytes import fp8_bytes as experiment


def cells_of(way: str, **wanted: object) -> list[Cell]:
    """Cells of a way with these fields."""
    return [
        cell for cell in experiment.cells() if cell["way"] == way and all(cell.get(n) == x for n, x in wanted.items())
    ]


def test_an_outlier_costs_others_with_a_scale_a_head_and_nothing_with_a_scale_a_block() -> None:
    found = {}
    for way in figure.EIGHT:
        for size in (1, experiment.OUTLIERS[-1]):
            (cell,) = cells_of(way, outlier=size)
            (row,) = experiment.EXPERIMENT.measured(cell, Context("host"))
            assert row.value is not None
            found[way, size] = row.value
    large = experiment.OUTLIERS[-1]
    assert found["scale a block", large] == found["scale a block", 1]
    assert found["scale a head", large] > 5 * found["scale a block", large]
    assert found["scale a head", 1] == pytest.approx(found["scale a block", 1], rel=0.3)


def test_the_figure_is_drawn_with_and_without_records() -> None:
    frame = tidy(figure.EXPERIMENTS)
    table = figure.draw(frame).table
    share = table[table["seqlen_k"] == experiment.LONGER]["share"]
    assert len(share) == 2 * len(experiment.MORE_QUERIES)
    assert share.between(0.5, 0.52).all()
    counted = table[(table["source"] == "measured") & table["share"].notna()]
    predicted = table[(table["source"] == "predicted") & (table["seqlen_k"] == experiment.KEYS)]
    assert list(counted["value"]) == list(predicted["value"])
    assert figure.draw(frame.iloc[:0]).table.empty
