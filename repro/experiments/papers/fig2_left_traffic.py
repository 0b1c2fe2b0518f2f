"""FlashAttention 2022, Fig. 2 left, by a card's counters: PyTorch's kernels at the figure's shape."""

from __future__ import annotations

from functools import cache

from repro.experiments import Cell, Context, Experiment
from repro.experiments.papers.fig2_left import SHAPE
from repro.experiments.shared.profiled import Profiled, seconds_of
from repro.experiments.shared.pytorch_runs import EAGER, SOURCES, cell, counter_rows
from repro.instruments.counters import KernelCount
from repro.measuring.records import Record

NAME = "fig2-left-traffic"
NAMES = ("sdpa-flash2", EAGER)


def cells(masked: bool = False) -> list[Cell]:
    """Both passes, without mask and dropout or, operation by operation, with them."""
    shape = {"batch": SHAPE.batch, "heads": SHAPE.heads, "seqlen": SHAPE.seqlen_q}
    return [cell(n, "forward+backward", masked=masked, **shape) for n in ((EAGER,) if masked else NAMES)]


@cache
def counted(masked: bool) -> Profiled[KernelCount]:
    """The counters of this process' run."""
    from repro.instruments.counted import count_cells

    return Profiled(cells(masked), count_cells, batch=len(NAMES), limit_s=60.0)


def measure(one: Cell, context: Context) -> list[Record]:
    """Bytes of every kernel, in the order of launch."""
    name = f"{NAME}-masked" if one["key_mask"] else NAME
    return counter_rows(name, one, counted(bool(one["key_mask"])).kernels(one), each=True)


EXPERIMENT = Experiment(
    name=NAME,
    title="HBM bytes of PyTorch's attention at the shape of Fig. 2",
    cells=cells,
    predict=lambda one: list[Record](),
    measure=measure,
    device="cuda",
    sources=SOURCES,
    seconds=seconds_of(2, 2),
)
