"""Chen et al. 2016, Fig. 7: seconds per step against depth, and what recomputation adds."""

import matplotlib.pyplot as plt
import pandas

from figures._checkpoint import COLOURS, NAMES
from figures.common import (
    HOLLOW,
    Drawing,
    devices,
    key,
    label_ends,
    note,
    pick,
    powers_of_two,
    series,
)
from repro.claims import Claim
from repro.claims import checkpointing as claims

EXPERIMENTS = ("checkpoint-depth",)
PANELS = {
    "resnet": ("ResNet", "layers", (128, 256, 512, 1024)),
    "lstm": ("LSTM", "unrolled steps", (64, 256, 1024)),
}
SHOWN = ("autograd", "chen-search", "recursive")


def draw(frame: pandas.DataFrame) -> Drawing:
    """Seconds left and middle, time relative to storing everything right."""
    rows = pick(frame, metric="time_s", implementation=SHOWN)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.3), layout="constrained")
    for ax, (model, (title, xlabel, ticks)) in zip(axes, PANELS.items(), strict=False):
        ends = []
        for name in SHOWN:
            some = pick(rows, model=model, implementation=name)
            points = series(ax, some, "depth", f"measured {model} {name}", color=COLOURS[name],
                            linestyle="-", linewidth=0.7)  # fmt: skip
            if len(points):
                last = points.iloc[-1]
                ends.append((last["depth"], last["value"], NAMES[name], COLOURS[name]))
        powers_of_two(ax, ticks)
        ax.set_yscale("log")
        ax.set(xlabel=xlabel, xlim=(ticks[0] / 1.3, ticks[-1] * 12))
        ax.set_title(f"{title}: seconds a step")
        label_ends(ax, ends)
    axes[0].set_ylabel("seconds of one thread per step")
    relative = claims.relative_times(frame)
    right = axes[2]
    for model, marker in (("mlp", "o"), ("resnet", "s"), ("lstm", "^")):
        for name in ("sqrt", "chen-search", "recursive"):
            some = pick(relative, model=model, implementation=name)
            line = pick(frame, metric="relative_time", source="predicted", model=model,
                        implementation=name)  # fmt: skip
            if len(some):
                right.plot(some["depth"], some["value"], marker=marker, color=COLOURS[name],
                           linestyle="none", markersize=6)  # fmt: skip
                series(right, line[line["depth"] <= 2048], "depth", f"predicted {model} {name}",
                       color=COLOURS[name])  # fmt: skip
    right.plot([1000], [1.3], marker="D", color=COLOURS["sqrt"], **HOLLOW)
    right.annotate("paper: about +30 %", (1000, 1.3), xytext=(0, -34), ha="center",
                   textcoords="offset points", fontsize=8, color="#555555")  # fmt: skip
    right.text(9, 1.0, "segments: at most one forward, +1/3", fontsize=8, color=COLOURS["sqrt"])
    right.text(9, 2.2, "halving: +(1/6) log2 L", fontsize=8, color=COLOURS["recursive"])
    powers_of_two(right, (16, 64, 256, 1024))
    right.set(xlabel="layers or steps", ylim=(0.8, 3.6))
    right.set_title("time relative to autograd")
    key(right, "CPU: o chain, □ ResNet, △ LSTM", loc="upper left")
    overhead = claims.executor_overhead(frame)
    note(
        figure,
        "Median of several steps. Right: over autograd; the executor storing everything takes "
        f"{overhead:.2f}x on stages this small.\nPrediction: backward twice the forward. Measured "
        f"on {devices(rows)}, one thread.",
    )
    columns = ["model", "depth", "implementation", "source", "metric", "value", "spread_min",
               "spread_max", "spread_n"]  # fmt: skip
    return Drawing(figure, pandas.concat([rows[columns], relative.reindex(columns=columns)]))


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """Chen's +30 %, and the notes' two claims about the price."""
    return [claims.chen_time(frame), claims.k10(frame)]
