"""Training in less memory: micro-batches, mixed precision, optimiser states on the host."""

import matplotlib.pyplot as plt
import pandas

from analysis.mixed_precision import POLICIES, autocast_break_even_tokens
from analysis.parallel_activations import LayerShape
from figures.common import FILLED, Drawing, curve, devices, key, log_axis, note, pick, say
from repro.experiments.checkpointing.training_memory import DEPTH, HEADS, HIDDEN, PARAMETERS, PIECES, SEQLEN, WIDTH

EXPERIMENTS = ("training-memory",)
COLOURS = {"fp32": "#D55E00", "autocast": "#E69F00", "16-bit": "#009E73"}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Three panels."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.2), layout="constrained")
    rows = pick(frame, implementation="accumulation", metric="peak_bytes").copy()
    rows["value"] /= 1e6
    curve(left, rows, "pieces", "peak", "#0072B2")
    log_axis(left, "x", PIECES, [str(p) for p in PIECES], base=2)
    log_axis(left, "y", [8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"], base=2)
    left.set(xlabel="micro-batches a step", ylabel="peak beyond parameters and gradients (MB)")
    left.set_title("gradient accumulation")
    key(left, "CPU", published=False, loc="lower left")

    rows = pick(frame, implementation="mixed-precision", metric="saved_bytes").copy()
    rows["tokens"] = rows["batch"] * SEQLEN
    rows["value"] /= rows["tokens"] * HIDDEN
    for policy in POLICIES:
        some = pick(rows, policy=policy)
        curve(middle, some, "tokens", policy, COLOURS[policy], line={"label": policy})
    even = autocast_break_even_tokens(LayerShape(SEQLEN, 1, HIDDEN, HEADS))
    middle.axvline(even, color="#777777", linewidth=0.8, linestyle=":")
    say(middle, f"autocast saves bytes\nfrom {even} tokens", (even, 108), (4, 0), color="#555555", fontsize=7.5)
    middle.set_xscale("log", base=2)
    ticks = sorted(rows["tokens"].unique())
    middle.set_xticks(ticks, [f"{t:g}" for t in ticks])
    middle.minorticks_off()
    middle.set_ylim(0, 125)
    middle.set(xlabel="tokens a step", ylabel="saved bytes a layer / (tokens x h)")
    middle.set_title(f"mixed precision, h = {HIDDEN}")
    middle.legend(loc="lower right")

    names = {"device_bytes": "device", "host_bytes": "host", "bytes_out": "down", "bytes_in": "up"}
    held = pick(frame, implementation="host-optimizer")
    for x, (metric, _) in enumerate(names.items()):
        for source in ("predicted", "measured"):
            value = pick(held, metric=metric, source=source)["value"] / PARAMETERS
            if source == "predicted":
                right.bar(x, value, 0.6, color="#0072B2", alpha=0.45)
            else:
                right.plot([x] * len(value), value, marker="o", color="#0072B2", **FILLED)
    right.set_xticks(range(4), names.values())
    right.set(ylabel="bytes a parameter", ylim=(0, 14))
    right.set_title("optimiser states on the host")
    note(
        figure,
        f"{devices(frame)}. Left: {DEPTH} linear + tanh layers of width {WIDTH}. Middle: one "
        f"transformer layer, h = {HIDDEN}, s = {SEQLEN}; "
        "autocast also saves a 16-bit copy of every weight.\nRight: bf16 parameters and "
        "gradients on the device, fp32 copy, momentum and variance on the host.",
    )
    columns = ["implementation", "policy", "batch", "pieces", "metric", "source", "value", "unit"]
    return Drawing(figure, frame.reindex(columns=columns))
