"""What the attention experiments share: rows of traffic, predicted or counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from analysis.traffic import predict_traffic
from kernels import hopper
from repro.measuring.cells import Cell, cell, cell_of, shape_of, tile_of
from repro.measuring.row import Row, row
from repro.prediction import sum_options

__all__ = ["STATISTICS", "cell", "cell_of", "predicted_traffic", "shape_of", "sum_of", "tile_of", "traffic_rows"]

#: Row statistics and fp32 accumulators: what an algorithm keeps beside the operands it is given.
STATISTICS = ("lse", "delta", "l", "m")


def sum_of(implementation: str) -> tuple[str, dict[str, Any]]:
    """The algorithm and the options of ``predict_traffic`` for an implementation, which is an
    algorithm itself or a form of the Hopper forward."""
    if implementation in hopper.FORMS:
        return hopper.ALGORITHM, sum_options(hopper.FORMS[implementation])
    return implementation, {}


def predicted_traffic(cell: Cell, **options: Any) -> Iterator[Row]:
    """The exact sum over the tile loop; options of ``predict_traffic``."""
    traffic = predict_traffic(str(cell["implementation"]), shape_of(cell), tile_of(cell), str(cell["pass"]), **options)
    return traffic_rows(traffic.kernels)


def traffic_rows(
    kernels: Mapping[str, Mapping[tuple[str, str], int]],
    *,
    tool: str = "sum over the tile loop",
    times: int = 1,
    **more: Any,
) -> Iterator[Row]:
    """A row per kernel, tensor and direction.

    times: how often the cell moves them. more: fields of every row.
    """
    for kernel, entries in kernels.items():
        for (tensor, direction), count in entries.items():
            where = {"level": "sm", "kernel": kernel, "tensor": tensor, "direction": direction}
            yield row("traffic_bytes", times * count, tool=tool, **where, **more)
