"""Chen et al. 2016, Figs. 5 and 6: peak memory of a training step against depth.

Lines are plans on chains derived from shapes, points are steps of real models metered at the
allocator. The paper's curves are not printed anywhere; what it prints is stated in the panels.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.checkpointing._checkpoint import COLOURS, MIB, NAMES, slope
from figures.common import Drawing, End, curve, devices, key, label_ends, note, pick, powers_of_two

EXPERIMENTS = ("checkpoint-depth",)
PANELS = {
    "mlp": ("plain chain", "layers", (8, 32, 128, 512), ""),
    "resnet": (
        "pre-activation ResNet (Fig. 5)",
        "layers",
        (64, 256, 1024),
        "published network, batch 32 at 224²:\nsee docs/claims.md, Chen Fig. 5",
    ),
    "lstm": (
        "LSTM (Fig. 6)",
        "unrolled steps",
        (32, 128, 512, 2048),
        "paper, 4 x 1024, batch 64:\nmore than 4x below the\noptimised linear plan",
    ),
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """A panel per model."""
    rows = pick(frame, metric="peak_bytes").copy()
    rows["mib"] = rows["value"] / MIB
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.6), layout="constrained")
    for ax, (model, (title, xlabel, ticks, paper)) in zip(axes, PANELS.items(), strict=True):
        some = pick(rows, model=model)
        panel(ax, some, ticks)
        ax.set(xlabel=xlabel)
        ax.set_title(title)
        if paper:
            ax.text(0.6, 0.75, paper, transform=ax.transAxes, va="top", fontsize=7.5, color="#555555")
    axes[0].set_ylabel("peak memory of a step (MiB)")
    key(axes[0], "CPU", published=False, loc="upper left")
    note(
        figure,
        "Plain: 512 x 64, GELU. ResNet: batch 2 at 16², 8-16-32 channels, 2 layers a block. LSTM: "
        "1 x 32, batch 16. fp32; parameters and their gradients not counted. Numbers are log-log "
        f"slopes over the last\nquadrupling. Grey: plain autograd. Measured on {devices(rows)}.",
    )
    columns = ["model", "depth", "implementation", "source", "value", "mib"]
    return Drawing(figure, rows[columns])


def panel(ax: Axes, rows: pandas.DataFrame, ticks: tuple[int, ...]) -> None:
    """Lines and points of one model, labelled with their slopes."""
    ends: list[End] = []
    for name, text in NAMES.items():
        some = pick(rows, implementation=name)
        if some.empty or name == "optimal-at-sqrt":  # on top of sqrt(L) by construction
            continue
        if name == "autograd":
            curve(ax, some, "depth", text, COLOURS[name], y="mib", sources=("measured",), points={"markersize": 4})
            continue
        label = f"{text}, {slope(pick(some, source='predicted')):.2f}"
        ends += curve(ax, some, "depth", label, COLOURS[name], y="mib")
    powers_of_two(ax, ticks)
    ax.set_yscale("log")
    ax.set_xlim(ticks[0] / 1.3, float(rows["depth"].max()) * 14)
    label_ends(ax, ends)
