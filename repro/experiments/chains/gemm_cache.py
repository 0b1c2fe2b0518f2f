"""Cache misses of a naive and a tiled matrix product in C, against the closed forms.

Counted by valgrind's cachegrind in caches small enough that a small product outgrows them. Where
valgrind is missing, the exact LRU model counts instead, and the row's tool says so. Beside it the
processor's own counter is asked, for a product that outgrows its first level; where the machine
hides it, the rows' note says why.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis.cache_model import Cache, closed_form, predict_misses
from repro.experiments import Cell, Context, Experiment, Row, row

BLOCK = 16
FIRST, LAST = Cache(4096, 8), Cache(16384, 16)
SIDES = (80, 96, 112)
#: For the processor's counter: three matrices of 0.9 MB, rows that do not meet in few sets.
HARDWARE_SIDE = 480


def cells() -> list[Cell]:
    """Both forms at each matrix size."""
    return [
        Cell(implementation=form, side=side, block=BLOCK, first_bytes=FIRST.nbytes, last_bytes=LAST.nbytes)
        for side in SIDES
        for form in ("naive", "tiled")
    ]


def predict(cell: Cell) -> Iterator[Row]:
    """The closed forms for both levels."""
    block = BLOCK if cell["implementation"] == "tiled" else None
    for metric, cache in (("first_level_misses", FIRST), ("last_level_misses", LAST)):
        yield row(metric, closed_form(int(cell["side"]), block, cache))


def measure(cell: Cell, context: Context) -> list[Row]:
    """Misses of both levels."""
    from repro.instruments import cachegrind, perf_misses

    side, name = int(cell["side"]), f"{cell['implementation']}_gemm"
    if (reason := cachegrind.missing()) is None:
        misses, tool = cachegrind.count_misses(side, BLOCK, FIRST, LAST)[name], "cachegrind"
    else:
        misses, tool = predict_misses(side, BLOCK, FIRST, LAST)[name], f"LRU model: {reason}"
    values = {"first_level_misses": misses.first, "last_level_misses": misses.last}
    values["references"] = misses.references

    rows = []
    try:
        counted = perf_misses.count_misses(HARDWARE_SIDE, BLOCK, str(cell["implementation"]))
        note = f"{perf_misses.EVENT}, N = {HARDWARE_SIDE}"
        rows.append(row("hardware_first_level_misses", counted, note=note, tool="perf stat"))
    except RuntimeError as reason:
        note = f"no hardware counter: {reason}"
    return rows + [row(metric, value, tool=tool, note=note) for metric, value in values.items()]


EXPERIMENT = Experiment(
    "gemm-cache",
    cells,
    predict,
    measure,
    device="cpu",
    sources=(
        "kernels/beside/gemm_cpu.c",
        "repro/instruments/cachegrind.py",
        "repro/instruments/perf_misses.py",
        "analysis/cache_model.py",
    ),
    seconds=20,
    timed=False,
    on_demand=True,
)
