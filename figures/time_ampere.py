"""Predicted TFLOP/s on an A100, of FlashAttention-2's machine code and of ours, and as published.

No GPU, and no number fitted: clocks follow from the code that the compilers made. That of
FlashAttention-2 is what torch ships, which is not the binary that was timed for the paper; ours are
predictions that no card has seen yet.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from analysis.hardware import find_gpu
from figures.common import HOLLOW, Drawing, label_ends, note, pick, powers_of_two
from repro import ampere_validation, flash2_time

EXPERIMENTS = ("throughput",)
PANELS = ((64, False), (64, True), (128, False), (128, True))
TICKS = (512, 1024, 2048, 4096, 8192, 16384)
BOTH = "forward+backward"
THEIRS, OURS = ("predicted, FA-2's code", "#E69F00"), ("predicted, ours", "#009E73")


def points_of(frame: pandas.DataFrame) -> list[ampere_validation.Point]:
    """The published numbers of an A100, each beside two predictions."""
    rows = pick(frame, source="published", implementation=ampere_validation.PUBLISHED)
    rows = rows[rows["value"].notna() & rows["device"].notna()]
    gpu = flash2_time.GPU
    return [
        ampere_validation.point(
            str(row["pass"]), int(row["batch"]), int(row["heads"]), int(row["seqlen_q"]),
            int(row["head_dim"]), bool(row["causal"]), float(row["value"]),
        )
        for _, row in rows.iterrows()
        if find_gpu(str(row["device"])) == gpu
    ]  # fmt: skip


def draw(frame: pandas.DataFrame) -> Drawing:
    """Four panels over N, forward and backward together; the table has the end points of each."""
    points = points_of(frame)
    figure, axes = plt.subplots(1, 4, figsize=(13.5, 3.9), layout="constrained", sharey=True)
    for ax, (head_dim, causal) in zip(axes, PANELS, strict=True):
        _panel(ax, [p for p in points if (p.head_dim, p.causal) == (head_dim, causal)])
        ax.set_title(f"d = {head_dim}, {'causal' if causal else 'no mask'}")
        ax.set_xlabel("sequence length N")
    axes[0].set_ylabel("TFLOP/s, forward and backward")
    note(
        figure,
        "A100 SXM, fp16, 16,384 tokens, hidden size 2,048. Hollow: FlashAttention-2, Fig. 4. "
        f"Lines: from machine code, {flash2_time.GPU.boost_clock_hz / 1e9:.2f} GHz; that of "
        f"FlashAttention-2 as torch {flash2_time.version()} ships it.",
    )
    columns = ["pass", "head_dim", "causal", "seqlen", "published", "predicted_flash2",
               "predicted_ours"]  # fmt: skip
    table = [
        (p.pass_, p.head_dim, p.causal, p.seqlen, p.published, p.theirs, p.ours) for p in points
    ]
    return Drawing(figure, pandas.DataFrame(table, columns=columns))


def _panel(ax: Axes, points: list[ampere_validation.Point]) -> None:
    curve = sorted((p for p in points if p.pass_ == BOTH), key=lambda p: p.seqlen)
    lengths = [p.seqlen for p in curve]
    ends = []
    for rates, (label, colour) in (([p.theirs for p in curve], THEIRS),
                                   ([p.ours for p in curve], OURS)):  # fmt: skip
        ax.plot(lengths, rates, color=colour, linewidth=1.5)
        if curve:
            ends.append((lengths[-1], rates[-1], label.removeprefix("predicted, "), colour))
    ax.plot(lengths, [p.published for p in curve], marker="o", color="#555555", **HOLLOW)
    if curve:
        ends.append((lengths[-1], curve[-1].published, "published", "#555555"))
    powers_of_two(ax, TICKS)
    ax.set_xlim(400, 16384 * 6)
    ax.set_ylim(0, 250)
    label_ends(ax, ends)
