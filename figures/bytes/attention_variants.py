"""Every way to compute exact attention: what is kept, what is alive at the peak, how long it takes.

Standard attention, the same under checkpointing, Rabe & Staats' chunks, ours, and torch's fused
back end, one head on this CPU. Checkpointing one attention lowers what is kept between layers, not
its own peak: the recomputed matrices are alive in its backward.
"""

import matplotlib.pyplot as plt
import pandas

from figures.common import COLOURS, Drawing, End, curve, devices, key, label_ends, note, pick, powers_of_two
from repro.experiments.bytes.attention_variants import HEAD_DIM, LENGTHS

EXPERIMENTS = ("attention-variants",)
VARIANTS = {
    "standard": ("standard", COLOURS["standard"], "o"),
    "standard-checkpointed": ("checkpointed", "#56B4E9", "s"),
    "chunked": ("chunked", "#E69F00", "^"),
    "sdpa-flash": ("torch's fused", "#7A7A7A", "D"),
    "flash": ("flash, ours", COLOURS["flash"], "o"),
    "flash-deterministic": ("ours, deterministic", COLOURS["flash-deterministic"], "v"),
}
PANELS = {
    "saved_bytes": ("kept for the backward pass", "MB", 1e6),
    "peak_bytes": ("peak, forward + backward", "MB", 1e6),
    "time_s": ("time, forward + backward", "ms", 1e-3),
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """A panel per quantity."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12.2, 4.4), layout="constrained")
    for ax, (metric, (title, unit, size)) in zip(axes, PANELS.items(), strict=True):
        rows = pick(frame, metric=metric).copy()
        rows["shown"] = rows["value"] / size
        ends: list[End] = []
        for name, (label, colour, marker) in VARIANTS.items():
            some = pick(rows, implementation=name)
            if some.empty:
                continue  # ours has no time on a CPU
            formula = "predicted" in set(some["source"])
            sources = ("predicted", "measured") if formula else ("measured",)
            looks = {"marker": marker} if formula else {"marker": marker, "linewidth": 0.7, "linestyle": ":"}
            ends += curve(ax, some, "seqlen_q", label, colour, y="shown", sources=sources, points=looks)
        ax.set_yscale("log")
        powers_of_two(ax, LENGTHS)
        ax.set(xlabel="sequence length N", ylabel=unit, xlim=(LENGTHS[0] * 0.85, LENGTHS[-1] * 5))
        ax.set_title(title)
        label_ends(ax, ends)
    key(axes[0], "this CPU", published=False, loc="upper left")
    note(
        figure,
        f"One head, d = {HEAD_DIM}, fp32, not causal. Storages as the dispatcher sees them, with "
        "our scratch; chunks 1024 × 4096. Dotted: no formula. Our kernels are emulated on a "
        f"CPU and have no time there. {devices(frame)}.",
    )
    kept = ["source", "implementation", "seqlen_q", "metric", "tensor", "value", "unit", "note"]
    return Drawing(figure, frame[frame["value"].notna()][[k for k in kept if k in frame]])
