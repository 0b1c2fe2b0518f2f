"""What the attention experiments share: rows of traffic, predicted or counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from analysis.traffic import predict_traffic
from kernels import hopper
from repro.measuring.cells import Cell, cell, shape_of, tile_of
from repro.measuring.records import Record, record
from repro.prediction import sum_options

__all__ = ["STATISTICS", "TRAFFIC", "cell", "predicted_traffic", "shape_of", "sum_of", "tile_of", "traffic_rows"]

TRAFFIC = {"metric": "traffic_bytes", "unit": "B", "level": "sm"}
#: Row statistics and fp32 accumulators: what an algorithm keeps beside the operands it is given.
STATISTICS = ("lse", "delta", "l", "m")


def sum_of(implementation: str) -> tuple[str, dict[str, Any]]:
    """The algorithm and the options of ``predict_traffic`` for an implementation, which is an
    algorithm itself or a form of the Hopper forward."""
    if implementation in hopper.FORMS:
        return hopper.ALGORITHM, sum_options(hopper.FORMS[implementation])
    return implementation, {}


def predicted_traffic(experiment: str, cell: Cell) -> Iterator[Record]:
    """The exact sum over the tile loop."""
    traffic = predict_traffic(str(cell["implementation"]), shape_of(cell), tile_of(cell), str(cell["pass"]))
    return traffic_rows(cell, traffic.kernels, experiment=experiment)


def traffic_rows(
    cell: Cell,
    kernels: Mapping[str, Mapping[tuple[str, str], int]],
    *,
    experiment: str,
    source: str = "predicted",
    tool: str = "sum over the tile loop",
    times: int = 1,
    **more: Any,
) -> Iterator[Record]:
    """A row per kernel, tensor and direction.

    times: how often the cell moves them. more: fields of every row.
    """
    for kernel, entries in kernels.items():
        for (tensor, direction), count in entries.items():
            yield record(
                cell,
                experiment=experiment,
                source=source,
                tool=tool,
                kernel=kernel,
                tensor=tensor,
                direction=direction,
                value=times * count,
                cell=cell.id,
                **TRAFFIC,
                **more,
            )
