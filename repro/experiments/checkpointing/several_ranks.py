"""What several ranks hold and send: sharded model states, a sharded layer, ring attention.

All of it comes from one run of ``repro.distributed.measure`` under torchrun for each number of
ranks: gloo on this CPU, NCCL where every rank has a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from repro.experiments import Cell, Context, Experiment, Row
from repro.experiments.shared import parallel_layer as _parallel_layer
from repro.experiments.shared import ring_attention as _ring_attention
from repro.experiments.shared import sharded_states as _sharded_states

PARTS: dict[str, ModuleType] = {module.PART: module for module in (_sharded_states, _parallel_layer, _ring_attention)}


def cells() -> list[Cell]:
    """The cells of all parts, by number of ranks."""
    found = [cell for part in PARTS.values() for cell in part.cells()]
    return sorted(found, key=lambda cell: int(cell["ranks"]))


def predict(cell: Cell) -> Iterator[Row]:
    """The part's formulas."""
    yield from PARTS[str(cell["part"])].predict(cell)


def measure(cell: Cell, context: Context) -> list[Row]:
    """The part's counts."""
    rows: list[Row] = PARTS[str(cell["part"])].measure(cell, context)
    return rows


EXPERIMENT = Experiment(
    "several-ranks",
    cells,
    predict,
    measure,
    device="cpu",
    sources=("repro/distributed", "repro/training"),
    seconds=40,
    timed=False,
    on_demand=True,
)
