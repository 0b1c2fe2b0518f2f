"""Throughput against sequence length as FlashAttention-2 and -3 draw it, peers on one card.

Every measured point is of the same card. The line is the bound of the time model (ceilings by
datasheet) for our Hopper kernels' tiles; the hollow points are what FlashAttention-3 prints for
an H100, so they are no peers of the H200's points but show the shape of the curve to expect.
"""

from typing import Any

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import COLOURS, Drawing, curve, devices, label_ends, note, pick, powers_of_two
from repro.claims.machine.peers import of_one_card, tflops

EXPERIMENTS = ("throughput", "throughput-peers", "gpu-throughput")
TICKS = (512, 1024, 2048, 4096, 8192, 16384)
PANELS = ((64, False), (64, True), (128, False), (128, True))
#: implementation -> (label, colour, marker); ours first.
MEASURED = {
    "flash": ("ours", "#009E73", "o"),
    "flash-sm90": ("ours, Hopper", "#006B4F", "D"),
    "flash-sm90-optimistic": ("ours, optimistic", "#66C2A5", "d"),
    "flash-attn-4 4.0.0b36 (Hopper path)": ("FA-4", "#CC79A7", "s"),
    "sdpa-cudnn": ("cuDNN", "#0072B2", "^"),
    "sdpa-flash2": ("FA-2 (torch)", "#E69F00", "v"),
    "sdpa-flash": ("FA-2 (torch)", "#E69F00", "v"),
    "sdpa-math": ("standard", "#D55E00", "x"),
}
PUBLISHED = {"flash3": ("FA-3, H100", "#555555")}


def draw(frame: pandas.DataFrame) -> Drawing:
    """Eight panels: forward above, backward below; head dimension and mask from left to right."""
    rows = of_one_card(tflops(frame))
    figure, axes = plt.subplots(2, 4, figsize=(13.5, 6.6), layout="constrained", sharex=True)
    for line, pass_ in zip(axes, ("forward", "backward"), strict=True):
        for ax, (head_dim, causal) in zip(line, PANELS, strict=True):
            panel(ax, pick(rows, pass_=pass_, head_dim=head_dim, causal=causal))
            mask = "causal" if causal else "no mask"
            ax.set_title(f"{pass_}, d = {head_dim}, {mask}")
        line[0].set_ylabel("TFLOP/s")
    for ax in axes[1]:
        ax.set_xlabel("sequence length N")
    note(
        figure,
        "16,384 tokens, hidden size 2,048. Filled: measured, bf16, "
        f"{devices(rows)}. Hollow: FlashAttention-3, Figs. 5 and 6, fp16, H100. Line: bound by "
        "ceilings (datasheet) for our Hopper kernels' tiles.",
    )
    columns = ["source", "implementation", "pass", "head_dim", "causal", "seqlen_q", "tflops"]
    return Drawing(figure, rows[columns].sort_values(columns[:-1]))


def panel(ax: Axes, rows: pandas.DataFrame) -> None:
    """One pass, head dimension and mask."""
    bound = pick(rows, implementation="flash-sm90")
    line = curve(ax, bound, "seqlen_q", "bound", COLOURS["bound"], y="tflops", sources=("predicted",))
    ends = [(x, y, label, "#777777") for x, y, label, _ in line]
    for name, (label, colour) in PUBLISHED.items():
        points = pick(rows, implementation=name, dtype="fp16", seqlen_q=list(TICKS))
        ends += curve(ax, points, "seqlen_q", label, colour, y="tflops", sources=("published",))
    for name, (label, colour, marker) in MEASURED.items():
        points = pick(rows, source="measured", implementation=name)
        points = points.groupby("seqlen_q", as_index=False).agg({"tflops": "median", "source": "first"})
        if points.empty:
            continue  # not every implementation is installed on every card
        style: dict[str, Any] = {"marker": marker}
        if marker == "x":
            style |= {"markeredgecolor": colour, "markeredgewidth": 1.4}
        end = curve(ax, points, "seqlen_q", label, colour, y="tflops", sources=("measured",), points=style)
        if label not in [known for *_, known, _ in ends]:  # FA-2 has two names
            ends += end
    powers_of_two(ax, TICKS)
    ax.set_ylim(bottom=0)
    ax.set_xlim(420, 16384 * 6)
    label_ends(ax, ends)
