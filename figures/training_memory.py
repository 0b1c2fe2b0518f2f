"""Training in less memory: micro-batches, mixed precision, optimiser states on the host."""

import matplotlib.pyplot as plt
import pandas

from analysis.mixed_precision import POLICIES, autocast_break_even_tokens
from analysis.model_states import host_streamed_bytes
from analysis.parallel_activations import LayerShape
from figures.common import FILLED, Drawing, Verdict, devices, key, note, pick, series
from figures.verdict_table import judged
from repro.experiments.training_memory import HEADS, HIDDEN, PARAMETERS, PIECES, SEQLEN

EXPERIMENTS = ("training-memory",)
COLOURS = {"fp32": "#D55E00", "autocast": "#E69F00", "16-bit": "#009E73"}
COMMAND = "make figures/out/training_memory.svg"


def draw(frame: pandas.DataFrame) -> Drawing:
    """Three panels."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.2), layout="constrained")
    rows = pick(frame, implementation="accumulation", metric="peak_bytes").copy()
    rows["value"] /= 1e6
    for source in ("predicted", "measured"):
        series(left, pick(rows, source=source), "pieces", f"{source} peak", color="#0072B2")
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    left.set_xticks(PIECES, [str(p) for p in PIECES])
    left.set_yticks([0.0625, 0.125, 0.25, 0.5, 1], ["1/16", "1/8", "1/4", "1/2", "1"])
    left.minorticks_off()
    left.set(xlabel="micro-batches a step", ylabel="peak beyond parameters and gradients (MB)")
    left.set_title("gradient accumulation: 1 / n")
    key(left, "CPU", published=False, loc="lower left")

    rows = pick(frame, implementation="mixed-precision", metric="saved_bytes").copy()
    rows["tokens"] = rows["batch"] * SEQLEN
    rows["value"] /= rows["tokens"] * HIDDEN
    for policy in POLICIES:
        some = pick(rows, policy=policy)
        for source in ("predicted", "measured"):
            label = policy if source == "predicted" else None
            series(middle, pick(some, source=source), "tokens", f"{source} {policy}",
                   color=COLOURS[policy], label=label)  # fmt: skip
    even = autocast_break_even_tokens(LayerShape(SEQLEN, 1, HIDDEN, HEADS))
    middle.axvline(even, color="#777777", linewidth=0.8, linestyle=":")
    middle.annotate(f"autocast saves bytes\nfrom {even} tokens", (even, 108), xytext=(4, 0),
                    textcoords="offset points", fontsize=7.5, color="#555555")  # fmt: skip
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
        f"{devices(frame)}. Left: {6} linear + tanh layers. Middle: one transformer layer, s = "
        f"{SEQLEN}; autocast also saves a 16-bit copy of every weight.\nRight: bf16 parameters and "
        "gradients on the device, fp32 copy, momentum and variance on the host.",
    )
    columns = ["implementation", "policy", "batch", "pieces", "metric", "source", "value", "unit"]
    return Drawing(figure, frame.reindex(columns=columns))


def verdicts(frame: pandas.DataFrame) -> list[Verdict]:
    """Peak by micro-batches, saved bytes by type, host optimiser."""

    def worst(name: str, metrics: list[str], keys: list[str]) -> float:
        rows = pick(frame, implementation=name, metric=metrics)
        table = rows.pivot_table(index=[*keys, "metric"], columns="source", values="value")
        if "measured" not in table or table["measured"].isna().any():
            return float("nan")
        ratio = table["measured"] / table["predicted"]
        return float(ratio.iloc[(ratio - 1).abs().argmax()])

    def shown(value: float) -> str:
        return "not measured yet" if value != value else f"worst {value - 1:+.2%}"

    peak = worst("accumulation", ["peak_bytes"], ["pieces"])
    saved = worst("mixed-precision", ["saved_bytes"], ["policy", "batch"])
    moved = worst("host-optimizer", ["device_bytes", "host_bytes", "bytes_out", "bytes_in"], [])
    timed = pick(frame, implementation="host-optimizer", source="measured").set_index("metric")
    step, bandwidth = (
        float(timed["value"].get(name, float("nan"))) for name in ("step_s", "stream_bytes_per_s")
    )
    bound = PARAMETERS * host_streamed_bytes() / bandwidth
    slower = step / bound
    even = autocast_break_even_tokens(LayerShape(SEQLEN, 1, HIDDEN, HEADS))
    return [
        Verdict("gradient accumulation", "activation memory falls as 1/n with n micro-batches",
                "4 rows x width x (depth + 3) bytes", shown(peak), "-", judged(peak, 1.0, 0.01),
                COMMAND),
        Verdict("mixed precision", "16-bit activations halve what a layer saves",
                f"sbh (34 + 5as/h) in 16 bits; autocast only from {even} tokens (weight copies)",
                shown(saved), "-", judged(saved, 1.0, 0.01), COMMAND),
        Verdict("optimiser on the host", "4 bytes a parameter stay, 12 leave, 2 + 2 move a step",
                "4, 12, 2, 2", shown(moved), "-", judged(moved, 1.0, 0.0), COMMAND),
        Verdict("optimiser on the host, time",
                f"an update is bound by host memory: {host_streamed_bytes():.0f} bytes a parameter",
                f"{bound * 1e3:.0f} ms at {bandwidth / 1e9:.1f} GB/s" if bound == bound else "-",
                f"{step * 1e3:.0f} ms ({slower:.2f}x)" if step == step else "not measured yet", "-",
                "open: not measured" if step != step else
                f"{'holds within limits' if 1 / 1.1 <= slower <= 2 else 'does not hold'} "
                f"({slower:.2f}x the bound, within 2x on one core)", COMMAND),
    ]  # fmt: skip
