"""FlashAttention 2022, Fig. 3 left: run time of one forward + backward against N.

Left the paper's run (Table 11, with dropout and mask), right an H200 with neither. Lines are
rooflines: no kernel of that design can be faster on that card. Short sequences are far above them,
where launching and idle SMs cost more than the work.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import COLOURS, Drawing, End, curve, key, label_ends, note, pick, powers_of_two
from repro.claims.attention.fig3_runtime import both_passes

EXPERIMENTS = ("fig3-runtime",)
PAPER = {
    "standard": ("standard", COLOURS["standard"]),
    "flash1": ("FlashAttention", COLOURS["flash1"]),
    "Linformer": ("Linformer", "#888888"),
    "flash1-block-sparse": ("block-sparse FA", "#56B4E9"),
}
TODAY = {
    "standard-eager": ("standard (eager)", COLOURS["standard"]),
    "sdpa-flash2": ("FlashAttention-2", COLOURS["flash"]),
    "sdpa-cudnn": ("cuDNN", "#CC79A7"),
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """2022 on the left, today on the right, the same axes."""
    rows = both_passes(frame)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.8, 4.4), sharey=True, layout="constrained")
    ends = {left: panel(left, rows["paper"], PAPER, "published"), right: panel(right, rows["today"], TODAY, "measured")}
    for ax in (left, right):
        ax.set_yscale("log")
        powers_of_two(ax, [128, 512, 2048, 8192, 32768])
        ax.set(xlabel="sequence length N", xlim=(100, 65536 * 24), ylim=(8e-3, 3e4))
        key(ax, "H200" if ax is right else None, published=ax is left, loc="upper left")
        label_ends(ax, ends[ax])
    left.set_ylabel("forward + backward (ms)")
    left.set_title("2022, A100: dropout and mask")
    right.set_title("H200, PyTorch 2.11: no dropout, no mask")
    note(
        figure,
        "Batch 16, 8 heads, d = 64, fp16. Predicted: rooflines (lower bounds) at datasheet"
        " (A100) and measured (H200) ceilings.",
    )
    kept = ["source", "implementation", "seqlen_q", "value", "unit", "device", "error"]
    csv = pandas.concat(rows.values())
    return Drawing(figure, csv.loc[csv["implementation"].isin([*PAPER, *TODAY]), kept])


def panel(ax: Axes, rows: pandas.DataFrame, names: dict[str, tuple[str, str]], kind: str) -> list[End]:
    """Points and rooflines of one set-up; returns where the labels go."""
    ends: list[End] = []
    for name, (text, colour) in names.items():
        some = pick(rows, implementation=name)
        bounded = "predicted" in set(some["source"])
        ends += curve(ax, some, "seqlen_q", text, colour, sources=("predicted", kind) if bounded else (kind,))
    return ends
