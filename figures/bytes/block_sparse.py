"""FlashAttention 2022, Fig. 2 right and Prop. 4: what block sparsity saves.

Left our traffic, forward + backward, as a share of the dense one, beside the paper's run time as a
share of its dense one: both are affine in the share of blocks. Right the fixed butterfly pattern,
whose share of blocks falls as log₂(n) / n, against dense attention.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas

from figures.common import COLOURS, Drawing, End, curve, key, label_ends, note, pick, powers_of_two, say, series
from repro.claims.attention.block_sparse import published, shares, totals
from repro.experiments.bytes.block_sparse import EXECUTED, HEAD_DIM, LENGTHS, PUBLISHED_LENGTH, TILE

EXPERIMENTS = ("block-sparse", "fig2-right")
OURS, BUTTERFLY = COLOURS["flash"], "#0072B2"


def draw(frame: pandas.DataFrame) -> Drawing:
    """Share against density; bytes of the butterfly and of dense attention against N."""
    table, paper = totals(frame), published(frame)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.6), layout="constrained")

    for seqlen, width in ((PUBLISHED_LENGTH, 1.8), (EXECUTED, 1.0)):
        rows = shares(table, seqlen)
        sources = ("predicted", "measured") if seqlen == EXECUTED else ("predicted",)
        looks = {"linewidth": width}
        curve(left, rows, "density", f"share, N = {seqlen}", OURS, y="share", sources=sources, line=looks)
    series(left, paper, "density", "published run time", y="share", color=COLOURS["published"])
    left.plot([0, 1], [0, 1], color=COLOURS["bound"], linewidth=0.8, linestyle=":")
    for height, text, colour in (
        (0.27, f"bytes: N = {PUBLISHED_LENGTH} (thick), {EXECUTED} (thin)", OURS),
        (0.21, "published: run time, N = 4k", COLOURS["published"]),
        (0.15, "dotted: the share of blocks itself", "#777777"),
    ):
        left.text(0.40, height, text, color=colour, fontsize=8.5, transform=left.transAxes)
    left.set(xlabel="share of blocks computed", ylabel="share of dense attention", xlim=(0, 1.03), ylim=(0, 1.08))
    left.set_title("forward + backward: affine in the density")
    key(left, "counted, host backend", loc="upper left")

    table["megabytes"] = table["value"] / 1e6
    ends: list[End] = []
    for pattern, colour in (("dense", COLOURS["flash"]), ("butterfly", BUTTERFLY)):
        rows = pick(table, pattern=pattern)
        ends += curve(right, rows, "seqlen_q", f"{pattern}, slope {tail_slope(rows):.2f}", colour, y="megabytes")
        if pattern == "butterfly":
            for _, at in pick(rows, source="predicted").iterrows():
                say(
                    right,
                    f"{at['density']:.0%}",
                    (at["seqlen_q"], at["megabytes"]),
                    (0, -13),
                    ha="center",
                    color=colour,
                    fontsize=7.5,
                )
    right.set_yscale("log")
    powers_of_two(right, LENGTHS)
    right.set(
        xlabel="sequence length N",
        xlim=(LENGTHS[0] * 0.75, LENGTHS[-1] * 5),
        ylabel="bytes across the SM boundary, one head (MB)",
    )
    right.set_title("butterfly blocks: N log N instead of N²")
    low, high = right.get_ylim()
    right.set_ylim(low / 1.6, high)
    label_ends(right, ends)
    note(
        figure,
        f"d = {HEAD_DIM}, fp16, blocks and tiles {TILE.block_m} × {TILE.block_n}. Published: "
        "FlashAttention 2022, Fig. 2 right, digitised ±1.5 ms; batch and heads not stated. Per "
        "cent: share of blocks in the butterfly.",
    )
    kept = ["source", "pattern", "seqlen_q", "density", "value"]
    out = [
        table[kept].assign(metric="traffic_bytes", unit="B"),
        paper[["source", "seqlen_q", "density", "value", "metric", "unit"]],
    ]
    return Drawing(figure, pandas.concat(out, ignore_index=True))


def tail_slope(rows: pandas.DataFrame) -> float:
    """Log-log slope of the exact sums over the last octave of N."""
    sums = pick(rows, source="predicted").sort_values("seqlen_q").tail(2)
    if len(sums) < 2:
        return float("nan")
    return float(np.diff(np.log(sums["value"]))[0] / np.diff(np.log(sums["seqlen_q"]))[0])
