"""Where to put a checkpoint in a transformer: bytes a layer keeps, peak and time of a step."""

import matplotlib.pyplot as plt
import pandas

from figures.checkpointing._checkpoint import MIB
from figures.common import FILLED, Drawing, devices, key, log_axis, note, pick, say
from repro.experiments.checkpointing.checkpoint_granularity import LAYERS, SHAPE

EXPERIMENTS = ("checkpoint-granularity",)
ORDER = (
    "each operation",
    "none",
    "every other block",
    "attention core",
    "each attention",
    "each block",
    "every two blocks",
)
COLOUR = "#0072B2"


def draw(frame: pandas.DataFrame) -> Drawing:
    """Bytes per layer, peak, time; a row per granularity."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), sharey=True, layout="constrained")
    place = {name: len(ORDER) - index for index, name in enumerate(ORDER)}
    for ax, metric in zip(axes, ("saved_bytes_per_layer", "peak_bytes", "relative_time"), strict=True):
        unit = 1 if metric == "relative_time" else MIB
        for name, y in place.items():
            line = pick(frame, implementation=name, metric=metric, source="predicted")
            for value in line["value"].head(1):
                value = value / unit
                ax.plot([value, value], [y - 0.3, y + 0.3], color=COLOUR, linewidth=2)
            for mode, marker, shift in (("new", "o", 0.0), ("reentrant", "s", -0.22)):
                points = pick(frame, implementation=name, metric=metric, source="measured", mode=mode)
                for value in points["value"]:
                    ax.plot(value / unit, y + shift, marker=marker, color=COLOUR, **FILLED)
                    if mode == "reentrant" and metric == "saved_bytes_per_layer":
                        say(ax, "reentrant", (value / unit, y + shift), (6, -3), fontsize=7.5)
    log_axis(axes[0], "x", [0.5, 2, 8, 32], ["1/2", "2", "8", "32"], base=2)
    axes[0].set_yticks(list(place.values()), list(place))
    axes[0].set(xlabel="MiB")
    axes[0].set_title("kept a layer for the backward")
    axes[1].set(xlabel="MiB", xlim=(0, None))
    axes[1].set_title(f"peak of a step, {LAYERS} layers")
    axes[2].set(xlabel="time relative to no checkpoint", xlim=(0.5, 2))
    axes[2].set_title("time of a step")
    key(axes[2], "CPU", published=False, loc="lower left")
    note(
        figure,
        f"GPT, {LAYERS} layers, h = {SHAPE['hidden']}, {SHAPE['heads']} heads, N = "
        f"{SHAPE['seqlen']}, batch {SHAPE['batch']}, fp32, dropout 0.1, attention "
        f"written out; torch.utils.checkpoint. Measured on {devices(frame)}, one thread.\n"
        "A bar is the prediction; peaks are measured only.",
    )
    columns = ["implementation", "mode", "metric", "source", "value", "unit"]
    return Drawing(figure, frame.reindex(columns=columns))
