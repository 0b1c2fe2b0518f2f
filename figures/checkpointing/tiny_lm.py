"""A small language model trained with standard attention, flash, and flash + checkpointing (K15).

Left the loss of three trainings from the same weights on the same batches; right how far the
gradients are apart, taken at the same weights. Checkpointing changes no bit: it repeats the same
deterministic operations. Flash changes the last bits, as any other order of summation does.
"""

import matplotlib.pyplot as plt
import pandas

from figures.common import COLOURS, Drawing, devices, label_ends, note, pick
from repro.claims.attention.tiny_lm import differing, losses
from repro.experiments.checkpointing.tiny_lm import STEPS

EXPERIMENTS = ("tiny-lm",)
LINES = {
    "standard": (COLOURS["standard"], "-", 3.2),
    "flash": (COLOURS["flash"], "-", 1.6),
    "flash+checkpoint": ("black", (0, (1, 2.5)), 1.4),
}
#: (implementation, against) -> label and colour of the right panel.
PAIRS = {
    ("standard", "float64"): ("standard and float64", COLOURS["standard"]),
    ("flash", "float64"): ("flash and float64", COLOURS["flash"]),
    ("flash", "standard"): ("flash and standard", "#0072B2"),
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Losses on the left, gradient differences on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.2), layout="constrained")
    table = losses(frame)
    for name, (colour, style, width) in LINES.items():
        if name in table:
            left.plot(
                table.index, table[name], color=colour, linestyle=style, linewidth=width, label=name.replace("+", " + ")
            )
    left.set(xlabel="step", ylabel="loss (nat per byte)", ylim=(0, None))
    left.set_title("three trainings, one curve")
    if len(table):
        left.legend(loc="upper right")

    rows = pick(frame, metric="gradient_relative_difference", source="measured")
    ends = []
    for (name, against), (label, colour) in PAIRS.items():
        some = pick(rows, implementation=name, against=against).sort_values("step")
        right.plot(some["step"], some["value"], color=colour, marker="o", markersize=3.5)
        if len(some):
            ends.append((some["step"].iloc[-1], some["value"].iloc[-1], label, colour))
    right.set_yscale("log")
    most = differing(frame)
    if most == most and len(rows):
        low = rows.loc[rows["value"] > 0, "value"].min()
        right.set_ylim(low / 6, None)
        text = "no element differs" if most == 0 else f"{most:.0f} elements differ"
        right.text(0, low / 4, f"flash + checkpoint and flash: {text}", fontsize=8.5)
    right.set(xlabel="step", xlim=(-5, STEPS * 1.42), ylabel="relative difference of all gradients (2-norm)")
    right.set_title("gradients at the same weights")
    label_ends(right, ends)
    shape = pick(frame, metric="loss").head(1)
    what = ""
    if len(shape):
        first = shape.iloc[0]
        what = (
            f"Byte-level transformer, 2 layers, {first['heads']:.0f} heads, "
            f"d = {first['head_dim']:.0f}, N = {first['seqlen_q']:.0f}, fp32, AdamW. "
        )
    note(figure, f"{what}Tiles 32 × 32, dq summed in a fixed order. {devices(frame)}, flash on the host backend.")
    kept = ["source", "implementation", "step", "metric", "against", "value", "unit"]
    return Drawing(figure, frame[frame["value"].notna()][[k for k in kept if k in frame]])
