"""Predicted TFLOP/s on an A100, of FlashAttention-2's machine code and of ours, and as published.

No GPU, and no number fitted: clocks follow from the code that the compilers made. That of
FlashAttention-2 is what torch ships, which is not the binary that was timed for the paper. Both
lines were registered before any card ran ours; what an A100 measures joins them, filled.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from analysis.hardware import find_gpu
from figures.common import Drawing, End, curve, label_ends, note, pick, powers_of_two
from repro.experiments.gpu.ampere_time import EXPERIMENT, OURS, PEER
from repro.timing import ampere_validation, flash2_time

EXPERIMENTS = ("throughput", "ampere-time")
PANELS = ((64, False), (64, True), (128, False), (128, True))
TICKS = (512, 1024, 2048, 4096, 8192, 16384)
BOTH = "forward+backward"
KINDS = {PEER: ("FA-2's code", "#E69F00"), OURS: ("ours", "#009E73")}
KEYS = ["source", "implementation", "head_dim", "causal", "seqlen_q"]


def rates(frame: pandas.DataFrame) -> pandas.DataFrame:
    """TFLOP/s of forward and backward together: published so, else from the two passes, of which
    the backward has 2.5 times the work."""
    rows = frame[frame["metric"] == "throughput_tflops"].dropna(subset=["value"])
    published = pick(rows, source="published", implementation=ampere_validation.PUBLISHED, pass_=BOTH)
    of_gpu = published["device"].map(lambda name: find_gpu(str(name)) == flash2_time.GPU)
    passes = pick(rows, experiment=EXPERIMENT.name).drop_duplicates([*KEYS, "pass"], keep="last")
    table = passes.pivot_table(index=KEYS, columns="pass", values="value").reindex(columns=["forward", "backward"])
    together = 3.5 / (1 / table["forward"] + 2.5 / table["backward"])
    both = together.dropna().rename("tflops").reset_index()
    shown = published[of_gpu.astype(bool)].rename(columns={"value": "tflops"})
    return pandas.concat([shown[[*KEYS, "tflops"]], both], ignore_index=True)


def draw(frame: pandas.DataFrame) -> Drawing:
    """Four panels over N, forward and backward together."""
    rows = rates(frame)
    figure, axes = plt.subplots(1, 4, figsize=(13.5, 3.9), layout="constrained", sharey=True)
    for ax, (head_dim, causal) in zip(axes, PANELS, strict=True):
        _panel(ax, pick(rows, head_dim=head_dim, causal=causal).sort_values("seqlen_q"))
        ax.set_title(f"d = {head_dim}, {'causal' if causal else 'no mask'}")
        ax.set_xlabel("sequence length N")
    axes[0].set_ylabel("TFLOP/s, forward and backward")
    note(
        figure,
        "A100 SXM, fp16, 16,384 tokens, hidden size 2,048. Hollow: FlashAttention-2, Fig. 4. "
        f"Lines: from machine code, {flash2_time.GPU.boost_clock_hz / 1e9:.2f} GHz; that of "
        f"FlashAttention-2 as torch {flash2_time.version()} ships it. Filled: measured, if any.",
    )
    return Drawing(figure, rows.sort_values(KEYS))


def _panel(ax: Axes, rows: pandas.DataFrame) -> None:
    ends: list[End] = []
    for name, (label, colour) in KINDS.items():
        some = pick(rows, implementation=name)
        known = [source for source in ("predicted", "measured") if source in set(some["source"])]
        ends += curve(ax, some, "seqlen_q", label, colour, y="tflops", sources=known)
    ends += curve(ax, rows, "seqlen_q", "published", "#555555", y="tflops", sources=("published",))
    powers_of_two(ax, TICKS)
    ax.set_xlim(400, 16384 * 6)
    ax.set_ylim(0, 250)
    label_ends(ax, ends)
