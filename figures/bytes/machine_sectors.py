"""Torch's compiled kernels run without a GPU: the bytes between L1 and L2 beside an H200's counters.

FlashAttention-2 and the kernels of unfused attention, read from torch's CUDA library and executed.
Formulas know the algorithm alone; the machine code has what the compiler added too: registers that a
kernel spills are written through to L2. Nothing is fitted.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.lines import Line2D

from figures.common import FILLED, Drawing, devices, note
from repro.experiments.bytes import machine_sectors

EXPERIMENTS = ("machine-sectors", "fig2-left-traffic", "fig2-left-traffic-masked", "l2-absorption")
GB = 1e9
THEORY, CODE, COUNTER = "#0072B2", "#D55E00", "black"
NAMES = {machine_sectors.FIG2: "", machine_sectors.MASKED: ", with mask and dropout"}


def label(row: pandas.Series) -> str:
    """The kernel and its shape."""
    if row["counters"] == machine_sectors.LONG:
        heads = f"{row['heads']} head{'s' if row['heads'] > 1 else ''}"
        return f"FlashAttention-2 forward, {heads}, N = {row['seqlen'] // 1024}k"
    name = str(row["kernel"])
    if name in machine_sectors.FLASH2:
        return f"FlashAttention-2 {name}"
    return f"torch {name}{NAMES[row['counters']]}"


def draw(frame: pandas.DataFrame) -> Drawing:
    """Reads on the left, writes on the right: formula and machine code as shares of the counter."""
    rows = machine_sectors.beside(frame)
    rows["label"] = [label(row) for _, row in rows.iterrows()]
    labels = list(dict.fromkeys(rows["label"]))
    figure, axes = plt.subplots(1, 2, figsize=(13, 1.8 + 0.3 * len(labels)), layout="constrained", sharey=True)
    for ax, direction in zip(axes, ("read", "write"), strict=True):
        these = rows[rows["direction"] == direction].drop_duplicates("label")
        places = [-labels.index(text) for text in these["label"]]
        formula, code = (these[name] / these["counter"] * 100 for name in ("formula", "machine_code"))
        ax.vlines(formula, [y - 0.32 for y in places], [y + 0.32 for y in places], color=THEORY, linewidth=2)
        ax.plot([100] * len(places), places, "o", color=COUNTER, **FILLED)
        ax.plot(code, places, "x", color=CODE, markersize=8, markeredgewidth=2)
        for y, (_, row) in zip(places, these.iterrows(), strict=True):
            ax.text(107, y, told(row), va="center", fontsize=7.5)
        ax.set(xlabel="share of the H200's counter (%)", title=f"{direction}s between L1 and L2", xlim=(0, 180))
        ax.set_xticks([0, 25, 50, 75, 100])
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks([-k for k in range(len(labels))], labels)
    axes[0].set_ylim(-len(labels) + 0.4, 0.6)
    handles = [
        Line2D([], [], color=THEORY, linewidth=2, label="predicted by the formulas"),
        Line2D(
            [], [], color=CODE, marker="x", linestyle="none", markeredgewidth=2, label="machine code, executed here"
        ),
        Line2D([], [], color=COUNTER, marker="o", **FILLED, label="measured: the H200's counter"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    cards = devices(frame[frame["experiment"] != machine_sectors.NAME])
    note(
        figure,
        f"{cards}, Nsight Compute, of the kernels of the same torch. Right of a row: machine code in GB, of it spilled "
        "registers,\nand its difference from the counter. Rows without a length: 1,024 heads of N = 1024, d = 64. "
        "L1 is taken to keep all that a block reads.",
    )
    return Drawing(figure, rows.drop(columns="label").assign(unit="B"))


def told(row: pandas.Series) -> str:
    """The bytes of the machine code in GB, what was spilled, and the difference from the counter."""
    off = row["machine_code"] / row["counter"] - 1
    difference = "exact" if off == 0 else f"{100 * off:+.1g} %"
    spilled = f" ({row['spilled'] / GB:.3g} spilled)" if row["spilled"] else ""
    return f"{row['machine_code'] / GB:.4g}{spilled}: {difference}"
