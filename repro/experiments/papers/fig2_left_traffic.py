"""FlashAttention 2022, Fig. 2 left, by a card's counters: PyTorch's kernels at the figure's shape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from repro.experiments import Cell, Context, Experiment, Row
from repro.experiments.papers.fig2_left import SHAPE
from repro.experiments.shared.profiled import Profiled, seconds_of
from repro.experiments.shared.pytorch_runs import EAGER, SOURCES, counter_rows, run
from repro.instruments.counters import KernelCount


def cells(masked: bool = False) -> list[Cell]:
    """Both passes, without mask and dropout or, operation by operation, with them."""
    shape = {"batch": SHAPE.batch, "heads": SHAPE.heads, "seqlen": SHAPE.seqlen_q, "head_dim": SHAPE.head_dim}
    names = (EAGER,) if masked else ("sdpa-flash2", EAGER)
    return [run(name, "forward+backward", masked=masked, **shape) for name in names]


@cache
def counted(masked: bool) -> Profiled[KernelCount]:
    """The counters of this process' run."""
    from repro.instruments.counted import count_cells

    return Profiled(cells(masked), count_cells, batch=2, limit_s=60.0)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Bytes of every kernel, in the order of launch."""
    return counter_rows(counted(bool(one["key_mask"])).kernels(one), each=True)


EXPERIMENT = Experiment(
    "fig2-left-traffic", cells, measure=measure, device="cuda", sources=SOURCES, seconds=seconds_of(2, 2)
)
