"""FlashAttention 2022, Fig. 2 left, as a table drawn to scale: traffic and FLOPs of both passes.

Two findings. The printed traffic fits lists of kernels (18 N² + 12 N d for standard attention with
mask and dropout, 33 N d for FlashAttention), integers chosen to match: the released FlashAttention
moves 45 N d across the SM boundary. What PyTorch moves today is such a list, by hardware counters.
The printed GFLOPs do not follow from the stated shape: batch 64 and 16 heads make 12 times as many.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import COLOURS, FILLED, HOLLOW, Drawing, key, note
from repro.claims.attention.fig2_left import Row, flop_rows, traffic_rows

EXPERIMENTS = ("fig2-left", "fig2-left-traffic", "fig2-left-traffic-masked")


def draw(frame: pandas.DataFrame) -> Drawing:
    """Traffic above, FLOPs below."""
    traffic, flops = list(traffic_rows(frame)), list(flop_rows(frame))
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(11.6, 5.0), height_ratios=(len(traffic), len(flops) + 0.6), layout="constrained"
    )
    panel(top, traffic, "GB")
    panel(bottom, flops, "GFLOP")
    top.set(xlim=(1.5, 1500), xlabel="bytes moved, forward + backward (GB)")
    top.set_xticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
    top.set_title("Printed traffic fits a list of kernels; counters confirm today's list")
    bottom.set(xlim=(20, 90000), xlabel="matrix products, forward + backward (GFLOP)")
    bottom.set_xticks([100, 1000], ["100", "1000"])
    bottom.set_title("Printed GFLOPs are not those of the stated batch and heads")
    key(top, "machine named", loc="upper left")
    note(
        figure,
        "FlashAttention 2022, Fig. 2 left: N = 1024, d = 64, 16 heads, batch 64, fp16. "
        "SM: across the SM boundary, one head executed, times 1024.",
    )
    table = pandas.DataFrame(
        [
            {
                "quantity": unit,
                "row": r.label,
                "predicted": r.predicted,
                "measured": r.measured,
                "measured_by": r.by if r.measured is not None else None,
                "published": r.published,
            }
            for unit, rows in (("traffic, GB", traffic), ("FLOPs, GFLOP", flops))
            for r in rows
        ]
    )
    return Drawing(figure, table)


def panel(ax: Axes, rows: list[Row], unit: str) -> None:
    """A line per row: a bar for predicted, a point for measured, a ring for published, numbers."""
    for place, row in enumerate(rows):
        colour = COLOURS[row.algorithm]
        if row.predicted is not None:
            ax.plot([row.predicted] * 2, [-place - 0.3, -place + 0.3], color=colour, lw=2)
        if row.measured is not None:
            ax.plot(row.measured, -place, "o", color=colour, **FILLED)
        if row.published is not None:
            ax.plot(row.published, -place, "o", color=COLOURS["published"], **HOLLOW)
        digits = 2 if unit == "GB" else 1
        parts = [
            f"{name} {value:.{digits}f}"
            for name, value in (("predicted", row.predicted), ("published", row.published))
            if value is not None
        ]
        if row.measured is not None:
            parts.insert(1, f"measured {row.measured:.{digits}f} ({row.by})")
        ax.text(0.56, -place, " · ".join(parts), transform=ax.get_yaxis_transform(), va="center", fontsize=8)
    ax.set_xscale("log")
    ax.set_yticks([-i for i in range(len(rows))], [r.label for r in rows])
    ax.set_ylim(-len(rows) + 0.4, 0.6)
    ax.minorticks_off()
    ax.grid(axis="y", visible=False)
