"""What a DRAM counter is made of: compulsory, read again, late, and unexplained bytes.

Every recorded counter of HBM reads and writes beside the formulas, as a share of what they predict.
The parts add up to the counter exactly (``analysis/hbm_residual.py``); nothing is fitted, so what
is left over is drawn as left over. The text right of a bar has the counter, and how many bytes of
the SM boundary L2 kept from reaching HBM.
"""

from typing import Any

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from figures.common import FILLED, Drawing, note
from repro.experiments.bytes import _residual

EXPERIMENTS = ("l2-absorption", "fig2-left-traffic", "fig2-left-traffic-masked", "gpu-traffic")
GB = 1e9
STACKED = {"compulsory": "#4D4D4D", "again": "#0072B2", "padding": "#56B4E9"}
LATE, UNEXPLAINED = "#E69F00", "#D55E00"
NAMES = {"sdpa-flash2": "FlashAttention-2", "standard-eager": "PyTorch, unfused"}
KEYS = {
    "compulsory": "each tensor once",
    "again": "moved again where L2 is too small (simulated L2)",
    "padding": "whole 32-byte sectors (none where sizes are multiples)",
}
NARROW = 13.0  # % of the prediction: a segment below it has no room for its number


def table(frame: pandas.DataFrame) -> pandas.DataFrame:
    """One row per recorded cell and direction: parts in bytes, and the cell's label."""
    rows = list(_residual.cells(_residual.residuals(frame)))
    columns = [*_residual.CELL, "direction", *_residual.SUMMED, "label"]
    found = [{**row, "label": label(row)} for row in rows]
    return pandas.DataFrame(found, columns=columns)


def label(cell: dict[str, Any]) -> str:
    """Implementation, pass and shape, as the axis names them."""
    name = NAMES.get(cell["implementation"], cell["implementation"])
    if cell["experiment"] == "fig2-left-traffic-masked":
        name += ", mask + dropout"
    if cell["causal"] is True:
        name += ", causal"
    n = int(cell["seqlen_q"])
    length = f"{n // 1024}k" if n % 1024 == 0 else str(n)
    heads = int(cell["batch"]) * int(cell["heads"])
    tile = "" if cell["block_m"] == "-" else f", {cell['block_m']:.0f} x {cell['block_n']:.0f}"
    pass_ = {"forward+backward": "both passes"}.get(cell["pass"], cell["pass"])
    shape = f"N = {length}, {heads} head{'s' if heads > 1 else ''}, d = {cell['head_dim']:.0f}"
    return f"{name}{tile}\n{pass_}, {shape}"


def draw(frame: pandas.DataFrame) -> Drawing:
    """Reads on the left, writes on the right, one bar for each recorded cell."""
    rows = table(frame)
    labels = list(dict.fromkeys(rows["label"]))
    height = 1.9 + 0.46 * max(len(labels), 3)
    figure, axes = plt.subplots(1, 2, figsize=(13, height), layout="constrained", sharey=True)
    for ax, direction in zip(axes, ("read", "write"), strict=True):
        these = rows[rows["direction"] == direction]
        ends = [bar(ax, -labels.index(row["label"]), row) for _, row in these.iterrows()]
        ax.axvline(100, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
        widest = max([*ends, 100.0])
        ax.set_xlim(0, widest * 1.8)
        ax.set_xticks([0, 25, 50, 75, 100])
        ax.set(xlabel="share of the bytes that formulas predict (%)")
        ax.set_title(f"HBM {direction}s")
        ax.grid(axis="y", visible=False)
        for _, row in these.iterrows():
            ax.text(widest * 1.04, -labels.index(row["label"]), told(row), va="center", fontsize=7.5)
    axes[0].set_yticks([-i for i in range(len(labels))], labels)
    axes[0].set_ylim(-len(labels) + 0.4, 0.6)
    handles: list[Any] = [Patch(facecolor=STACKED[part], label=text) for part, text in KEYS.items()]
    handles.append(
        Patch(facecolor="#FFFFFF", edgecolor=LATE, hatch="//////", label="late: still in L2 when the counter was read")
    )
    handles.append(Patch(facecolor=UNEXPLAINED, label="unexplained"))
    handles.append(plt.Line2D([], [], marker="o", color="black", **FILLED, label="counter"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    cards = ", ".join(sorted(set(rows["device"]))) or "no machine yet"
    note(
        figure,
        f"{cards}, Nsight Compute. All numbers in GB. Right of a bar: the counter, and in brackets "
        "what crossed the SM boundary and L2 kept from HBM.",
    )
    return Drawing(figure, rows.drop(columns="label").assign(unit="B"))


def bar(ax: Axes, y: float, row: pandas.Series) -> float:
    """One bar; returns how far it reaches (% of the prediction)."""
    predicted = sum(row[part] for part in STACKED)
    if predicted == 0:  # a kernel that no formula knows: all of it is unexplained
        ax.barh(y, 100, height=0.6, color=UNEXPLAINED)
        ax.plot(100, y, "o", color="black", **FILLED)
        return 100.0
    counter = row["counter"] / predicted * 100
    late = row["late"] / predicted * 100
    left = 0.0
    for part, colour in STACKED.items():
        width = row[part] / predicted * 100
        ax.barh(y, width, left=left, height=0.6, color=colour, linewidth=0.5)
        seen = min(left + width, 100 + late) - left  # the rest is behind the hatching
        if seen > NARROW:
            ax.text(left + seen / 2, y, f"{row[part] / GB:.3g}", ha="center", va="center", fontsize=7, color="white")
        left += width
    if late:
        ax.barh(y, -late, left=100 + late, height=0.6, color="#FFFFFF", edgecolor=LATE, hatch="//////", linewidth=0.8)
    extra = row["unexplained"] / predicted * 100
    start = 100 + late
    ax.barh(y, extra, left=start, height=0.6, color=UNEXPLAINED, linewidth=0.5)
    ax.plot(counter, y, "o", color="black", **FILLED)
    return float(max(100.0, counter))


def told(row: pandas.Series) -> str:
    """The counter in GB, what L2 absorbed, and the unexplained share of the counter."""
    absorbed = "" if pandas.isna(row["absorbed"]) else f" ({row['absorbed'] / GB:.3g})"
    extra = row["unexplained"] / row["counter"] if row["counter"] else 0.0
    left = f", {extra:+.1%} unexplained" if abs(extra) >= 0.0005 else ""
    late = f", {-row['late'] / GB:.3g} late" if row["late"] else ""
    return f"{row['counter'] / GB:.3g}{absorbed}{late}{left}"
