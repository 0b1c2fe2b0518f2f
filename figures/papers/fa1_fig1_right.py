"""FlashAttention 2022, Fig. 1 right: the forward pass of unfused attention, operation by operation.

Stacked times. Outlined: published; filled: measured; pale: the roofline of each operation, which
is memory-bound in all five. The rooflines say what the five kernels must cost on each card; what
is above them is the kernels' own doing.
"""

from typing import Any

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from figures.common import COLOURS, Drawing, note
from repro.claims.attention.fig1_right import OPERATIONS, times

EXPERIMENTS = ("fig1-right",)
HUES = dict(zip(OPERATIONS, ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"), strict=True))
FUSED = COLOURS["standard"]
#: Label, source, part of the device's name, fused implementation (None: the five operations).
BARS = (
    ("unfused, published (2022)", "published", "A100", None),
    ("unfused, roofline of the A100", "predicted", "A100", None),
    ("FlashAttention, published (2022)", "published", "A100", "fused FlashAttention"),
    ("fused, roofline of the A100", "predicted", "A100", "fused flash1"),
    ("unfused, measured on the H200", "measured", "H200", None),
    ("unfused, roofline of the H200", "predicted", "H200", None),
    ("FlashAttention-2 with dropout, H200", "measured", "H200", "fused sdpa-flash2 (dropout 0.1)"),
    ("FlashAttention-2, H200", "measured", "H200", "fused sdpa-flash2"),
    ("cuDNN, H200", "measured", "H200", "fused sdpa-cudnn"),
    ("fused, roofline of the H200", "predicted", "H200", "fused flash"),
)


def draw(frame: pandas.DataFrame) -> Drawing:
    """One horizontal bar per run, the A100's group above the H200's."""
    figure, ax = plt.subplots(figsize=(9.2, 4.6), layout="constrained")
    kept = []
    for place, (label, source, card, fused) in enumerate(BARS):
        y = -place - (0.6 if card == "H200" else 0)
        ms = times(frame, source, card)
        wanted = [fused] if fused else list(OPERATIONS)
        parts = {name: ms[name] for name in wanted if name in ms}
        total = bar(ax, y, parts, source)
        ax.text(total, y, f"  {total:.2f} ms" if parts else "  no record", va="center", fontsize=8)
        kept += [{"bar": label, "source": source, "operation": n, "ms": v} for n, v in parts.items()]
    places = [-i - (0.6 if bar[2] == "H200" else 0) for i, bar in enumerate(BARS)]
    ax.set_yticks(places, [bar[0] for bar in BARS])
    ax.set(xlabel="forward pass (ms)", xlim=(0, 19.5))
    ax.set_title("Unfused attention is five memory-bound passes over N² numbers")
    ax.grid(axis="y", visible=False)
    handles = [Patch(color=c, label=name.replace("^T", "ᵀ")) for name, c in HUES.items()]
    handles += [
        Patch(color=FUSED, label="all in one kernel"),
        Patch(facecolor="white", edgecolor="#555555", label="outlined: published"),
        Patch(facecolor="#555555", label="filled: measured"),
        Patch(facecolor="#555555", alpha=0.35, label="pale: predicted (roofline)"),
    ]
    ax.legend(handles=handles, loc="lower right", ncols=1)
    note(
        figure,
        "Batch 64, 16 heads, N = 1024, d = 64, fp16 (H200 and rooflines). The paper's "
        "caption names neither batch, heads nor card; bars digitised, ±0.02 ms.",
    )
    return Drawing(figure, pandas.DataFrame(kept))


def bar(ax: Axes, y: float, parts: dict[str, float], source: str) -> float:
    """One stacked bar in the manner of its source; returns its end."""
    left = 0.0
    for name, width in parts.items():
        colour = HUES.get(name, FUSED)
        looks: dict[str, dict[str, Any]] = {
            "published": {"facecolor": "white", "edgecolor": colour, "linewidth": 1.8},
            "measured": {"facecolor": colour, "edgecolor": "white"},
            "predicted": {"facecolor": colour, "edgecolor": "white", "alpha": 0.35},
        }
        inset = 0.04 if source == "published" else 0.0  # outlines must not hide each other
        ax.barh(y, width - 2 * inset, left=left + inset, height=0.62, **looks[source])
        left += width
    return left
