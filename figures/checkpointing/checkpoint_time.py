"""Chen et al. 2016, Fig. 7: seconds per step against depth, and what recomputation adds."""

import matplotlib.pyplot as plt
import pandas

from figures.checkpointing._checkpoint import COLOURS, NAMES
from figures.common import HOLLOW, Drawing, devices, key, label_ends, log_axis, note, pick, powers_of_two, say, series
from repro.claims.checkpointing import chen
from repro.experiments.checkpointing.checkpoint_time import DEPTHS

EXPERIMENTS = ("checkpoint-depth", "checkpoint-time")
PANELS = {
    "resnet": ("ResNet", "layers", (128, 256, 512, 1024)),
    "lstm": ("LSTM", "unrolled steps", (64, 256, 1024, 2048)),
}
SHOWN = ("autograd", "chen-search", "recursive")


def draw(frame: pandas.DataFrame) -> Drawing:
    """Seconds left and middle, time relative to storing everything right."""
    rows = pick(frame, experiment="checkpoint-depth", metric="time_s", implementation=SHOWN)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.3), layout="constrained")
    for ax, (model, (title, xlabel, ticks)) in zip(axes, PANELS.items(), strict=False):
        ends = []
        for name in SHOWN:
            some = pick(rows, model=model, implementation=name)
            points = series(
                ax, some, "depth", f"measured {model} {name}", color=COLOURS[name], linestyle="-", linewidth=0.7
            )
            if len(points):
                last = points.iloc[-1]
                ends.append((last["depth"], last["value"], NAMES[name], COLOURS[name]))
        powers_of_two(ax, ticks)
        ax.set_yscale("log")
        ax.set(xlabel=xlabel, xlim=(ticks[0] / 1.3, ticks[-1] * 12))
        ax.set_title(f"{title}: seconds a step")
        label_ends(ax, ends)
    axes[0].set_ylabel("seconds of one thread per step")
    relative = chen.relative_times(frame)
    right = axes[2]
    for model, marker in (("mlp", "o"), ("resnet", "s"), ("lstm", "^")):
        for name in ("sqrt", "chen-search", "recursive"):
            some = pick(relative, model=model, implementation=name)
            line = pick(
                frame,
                experiment="checkpoint-depth",
                metric="relative_time",
                source="predicted",
                model=model,
                implementation=name,
            )
            if len(some):
                right.plot(
                    some["depth"], some["value"], marker=marker, color=COLOURS[name], linestyle="none", markersize=6
                )
                series(right, line[line["depth"] <= 2048], "depth", f"predicted {model} {name}", color=COLOURS[name])
    large = [
        (DEPTHS[model], chen.published_size(frame, model, "chen-search"), marker)
        for model, marker in (("resnet", "s"), ("lstm", "^"))
    ]
    for depth, value, marker in large:
        right.plot([depth], [value], marker=marker, color="black", markersize=10, linestyle="none")
    right.plot([1000], [1.3], marker="D", color=COLOURS["sqrt"], **HOLLOW)
    say(right, "paper: about +30 %", (1000, 1.3), (0, -24), ha="center", color="#555555")
    right.text(9, 1.04, "segments: at most one forward, +1/3", fontsize=8, color=COLOURS["sqrt"])
    right.text(9, 2.2, "halving: +(1/6) log2 L", fontsize=8, color=COLOURS["recursive"])
    powers_of_two(right, (16, 64, 256, 1024))
    log_axis(right, "y", [1, 1.3, 2, 3, 4, 6, 8], ["1", "1.3", "2", "3", "4", "6", "8"])
    right.set(xlabel="layers or steps", ylim=(0.85, 20))
    right.set_title("time relative to autograd")
    key(right, "CPU: o chain, □ ResNet, △ LSTM", loc="upper left")
    overhead = chen.executor_overhead(frame)
    note(
        figure,
        "Median of several steps. Right: over autograd; the executor storing everything takes "
        f"{overhead:.2f}x on small stages. Black: the ResNet of 200 layers released by the authors "
        "and their LSTM, whose stages take a tenth of a second.\nPrediction: backward twice the "
        f"forward. Measured on {devices(rows)}, one thread.",
    )
    columns = ["model", "depth", "implementation", "source", "metric", "value", "spread_min", "spread_max", "spread_n"]
    return Drawing(figure, pandas.concat([rows[columns], relative.reindex(columns=columns)]))
