"""Where the bytes of attention go: a bar per algorithm, a segment per tensor and reason.

- compulsory: every input read once, every output written once; no algorithm moves less;
- read again: inputs loaded more than once, the price of tiles;
- intermediates: S, P, dP, dS, and O or dQ while they are still partial;
- statistics: l and m, or lse and delta, fp32 rows.

Hatched: what padding the ragged last tile to a whole one would add; the kernels do not move it.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from figures.common import FILLED, Drawing, note, pick
from repro.claims.attention.attribution import split
from repro.experiments.bytes.traffic_attribution import SEQLEN, TILES

EXPERIMENTS = ("traffic-attribution",)
MB = 1e6
REASONS = {
    "compulsory": "#4D4D4D",
    "read again": "#0072B2",
    "intermediates": "#E69F00",
    "statistics": "#CC79A7",
    "padding avoided": "#FFFFFF",
}
LABELS = {
    ("standard", False): "standard",
    ("flash1-literal", False): "FA-1, Alg. 1 and 4",
    ("flash1-released", False): "FA-1, as released",
    ("flash", False): "queries outside / FA-2",
    ("flash", True): "the same, causal",
}
TENSORS = {"s": "S", "p": "P", "dp": "dP", "ds": "dS", "dq_accum": "dQ fp32"}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Forward on the left, backward on the right."""
    predicted, measured = split(frame, "predicted"), split(frame, "measured")
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.2), layout="constrained", sharey=True)
    for ax, pass_ in zip(axes, ("forward", "backward"), strict=True):
        sums = pick(predicted, pass_=pass_).groupby(["implementation", "causal"])["value"].sum()
        widest = sums.max() / MB * 1.32 if len(sums) and sums.max() > 0 else 1.0
        ax.set_xlim(0, widest)
        for place, (name, causal) in enumerate(LABELS):
            wanted = {"implementation": name, "causal": causal, "pass_": pass_}
            total, end = bar(ax, -place, pick(predicted, **wanted), widest)
            counted = pick(measured, **wanted)["value"].sum() / MB
            if counted:
                ax.plot(counted, -place, "o", color="black", **{**FILLED, "linestyle": "none"})
            tile = TILES[name, pass_]
            ax.text(end, -place, f"  {total:.2f} MB ({tile.block_m} x {tile.block_n})", va="center", fontsize=8)
        ax.set(xlabel="bytes across the SM boundary, one head (MB)")
        ax.set_title(pass_)
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks([-i for i in range(len(LABELS))], list(LABELS.values()))
    handles = [
        Patch(facecolor=colour, edgecolor="#777777", hatch="////" if "padding" in reason else None, label=reason)
        for reason, colour in REASONS.items()
    ]
    handles.append(axes[1].plot([], [], "o", color="black", **FILLED, label="counted, host backend")[0])
    axes[1].legend(handles=handles, loc="lower right")
    note(
        figure,
        f"N = {SEQLEN}, d = 64, fp16, one head; tile rows x keys in brackets. Bars: exact sums over the tile loop.",
    )
    return Drawing(figure, pandas.concat([predicted, measured]).assign(unit="B"))


def bar(ax: Axes, y: float, parts: pandas.DataFrame, widest: float) -> tuple[float, float]:
    """One stacked bar, named where there is room; its end without and with padding, in MB."""
    left = total = 0.0
    for reason, colour in REASONS.items():
        padding = reason == "padding avoided"
        if padding:
            total = left
        for _, part in pick(parts, reason=reason).groupby("tensor", as_index=False):
            width = part["value"].sum() / MB
            ax.barh(
                y,
                width,
                left=left,
                height=0.62,
                color=colour,
                linewidth=0.5,
                edgecolor="#777777" if padding else "white",
                hatch="//////" if padding else None,
            )
            tensor = str(part["tensor"].iloc[0])
            name = TENSORS.get(tensor, tensor)
            if width > 0.012 * widest * (len(name) + 0.5) and not padding:
                ink = "black" if reason == "intermediates" else "white"
                ax.text(left + width / 2, y, name, ha="center", va="center", fontsize=7, color=ink)
            left += width
    return total, left
