"""Cache misses of a naive and a tiled matrix product in C, against the closed forms.

Counted by valgrind's cachegrind in caches small enough that a small product outgrows them. Where
valgrind is missing, the exact LRU model counts instead, and the row's tool says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis.cache_model import Cache, closed_form, predict_misses
from repro.experiments import Cell, Context, Experiment, record
from repro.records import Record

NAME = "gemm-cache"
BLOCK = 16
FIRST, LAST = Cache(4096, 8), Cache(16384, 16)
SIDES = (80, 96, 112)


def cells() -> list[Cell]:
    """Both forms at each matrix size."""
    return [
        Cell(implementation=form, side=side, block=BLOCK, first_bytes=FIRST.nbytes,
             last_bytes=LAST.nbytes)
        for side in SIDES
        for form in ("naive", "tiled")
    ]  # fmt: skip


def predict(cell: Cell) -> Iterator[Record]:
    """The closed forms for both levels."""
    block = BLOCK if cell["implementation"] == "tiled" else None
    for metric, cache in (("first_level_misses", FIRST), ("last_level_misses", LAST)):
        yield record(
            cell, experiment=NAME, metric=metric, source="predicted", unit="1",
            value=closed_form(int(cell["side"]), block, cache),
        )  # fmt: skip


def measure(cell: Cell, context: Context) -> list[Record]:
    """Misses of both levels."""
    from repro.instruments import cachegrind

    side, name = int(cell["side"]), f"{cell['implementation']}_gemm"
    if (reason := cachegrind.missing()) is None:
        misses, tool = cachegrind.count_misses(side, BLOCK, FIRST, LAST)[name], "cachegrind"
    else:
        misses, tool = predict_misses(side, BLOCK, FIRST, LAST)[name], f"LRU model: {reason}"
    values = {"first_level_misses": misses.first, "last_level_misses": misses.last}
    values["references"] = misses.references
    return [
        record(
            cell, experiment=NAME, metric=metric, source="measured", value=value, unit="1",
            tool=tool,
        )
        for metric, value in values.items()
    ]  # fmt: skip


EXPERIMENT = Experiment(
    name=NAME,
    title="cache misses of a naive and a tiled product",
    cells=cells,
    predict=predict,
    measure=measure,
    device="cpu",
    sources=("kernels/gemm_cpu.c", "repro/instruments/cachegrind.py", "analysis/cache_model.py"),
    seconds=20,
    on_demand=True,
)
