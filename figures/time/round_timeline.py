"""One round of the main loop on an SM, clock by clock, from the machine code of two forms."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis.loop_model.native import Simulated, simulate
from analysis.loop_model.parameters import Unit
from analysis.loop_model.program import Program
from figures.common import Drawing, note
from repro.timing import prototype

EXPERIMENTS = ()
#: Variant, what it is; the same tile, 128 x 128 at head_dim 128, two consumer warpgroups in turn.
FORMS = (("C3", "exact softmax"), ("optimistic_128", "optimistic softmax: no row maximum"))
SEQLEN, ROUND = 2048, 6  # of 16: the loop has settled
GROUPS = ("#0072B2", "#D55E00")
WORK = {
    "exp2": ((Unit.XU,), "#CC79A7"),
    "FMA": ((Unit.FMA, Unit.FMA_HEAVY), "#009E73"),
    "maximum, compare, convert": ((Unit.ALU,), "#E69F00"),
}
FIRST_WARPS = (4, 8)
"""Of the two consumer warpgroups; both are on scheduler 0, beside the one that copies."""


def draw(frame: pandas.DataFrame) -> Drawing:
    """A panel a form: tensor cores by warpgroup, and what a warp of each issues."""
    del frame  # nothing measured is shown
    figure, axes = plt.subplots(2, 1, figsize=(11, 5.6), layout="constrained", sharex=True)
    table: list[dict[str, str | float]] = []
    for ax, (variant, title) in zip(axes, FORMS, strict=True):
        program = prototype.program(variant, SEQLEN, 0, None, ())
        found = simulate(program)
        start, end = bounds(program, found, ROUND)
        busy = _panel(ax, program, found, start, end)
        ax.set_title(f"{title}: {end - start:,} clocks a round, tensor cores busy {100 * busy:.0f} %")
        table.append({"variant": variant, "clocks": end - start, "tensor_busy": busy})
    axes[-1].set_xlabel("clocks")
    axes[0].set_xlim(0, max(float(row["clocks"]) for row in table))
    handles = [Patch(color=c, label=f"products of warpgroup {k}") for k, c in enumerate(GROUPS)]
    handles += [Patch(color=colour, label=name) for name, (_, colour) in WORK.items()]
    axes[0].legend(handles=handles, ncols=5, loc="upper right", bbox_to_anchor=(1, 1.32))
    note(
        figure,
        "Predicted from the machine code of two prototype forms (results/prototype), tile "
        "128 x 128, d = 128, bf16, sm_90a; nothing here is measured.\nA warpgroup issues S = Q Kᵀ "
        "of the next key tile together with P V of this one. In the exact form the compiler let "
        "only most of the row maximum\nrun under its own P V (the wait for it comes before the "
        "exponentials), so the tensor cores run dry; without a maximum they hardly do.",
    )
    return Drawing(figure, pandas.DataFrame(table))


def bounds(program: Program, found: Simulated, number: int) -> tuple[int, int]:
    """Clocks between the first products that warpgroup 0 issues in a round and in the next."""
    way, issued = program.ways[FIRST_WARPS[0]], found.issued[FIRST_WARPS[0]]
    opens = [
        int(clock)
        for step, clock in zip(way.steps, issued, strict=True)
        if program.table[step].operation.unit == Unit.TENSOR and not program.table[step].accumulates
    ]
    return opens[number], opens[number + 1]


def _panel(ax: Axes, program: Program, found: Simulated, start: int, end: int) -> float:
    starts, ends, groups = found.products
    inside = (ends > start) & (starts < end)
    busy = 0
    for a, b, group in zip(starts[inside], ends[inside], groups[inside], strict=True):
        low, high = max(a, start) - start, min(b, end) - start
        busy += high - low
        # Warpgroup 0 copies; the consumers are 1 and 2.
        ax.broken_barh([(low, high - low)], (2.1, 0.8), color=GROUPS[group - 1], linewidth=0)
    for place, warp in enumerate(FIRST_WARPS):
        way, issued = program.ways[warp], found.issued[warp]
        units = np.array([program.table[step].operation.unit for step in way.steps])
        now = (issued >= start) & (issued < end)
        for kinds, colour in WORK.values():
            chosen = issued[now & np.isin(units, kinds)] - start
            ax.vlines(chosen, 1.1 - place, 1.9 - place, color=colour, linewidth=0.55)
    ax.set_yticks((2.5, 1.5, 0.5), ("tensor cores", "issued by\nwarpgroup 0", "issued by\nwarpgroup 1"))
    ax.set_ylim(0, 3)
    ax.grid(visible=False)
    return busy / (end - start)
