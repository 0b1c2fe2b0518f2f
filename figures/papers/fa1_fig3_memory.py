"""FlashAttention 2022, Fig. 3 right: peak memory of one forward + backward against N.

Left the paper's run (Table 21), right the same shape on an H200 with PyTorch 2.11. Lines are sums
of the tensors alive at the peak, with no constant fitted. On the H200 the matrix library's
workspace, allocated before the pass, is taken off; the paper's table is shown as printed.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import COLOURS, Drawing, End, curve, key, label_ends, note, pick, powers_of_two, series
from repro.claims.attention.fig3_memory import MIB, PAPER, TODAY, prepared

EXPERIMENTS = ("fig3-memory",)
COLOUR = {
    "standard": COLOURS["standard"],
    "standard-eager": COLOURS["standard"],
    "flash1": COLOURS["flash1"],
    "sdpa-flash2": COLOURS["flash"],
}


def draw(frame: pandas.DataFrame) -> Drawing:
    """2022 on the left, today on the right, the same axes."""
    rows = prepared(frame)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.8, 4.4), sharey=True, layout="constrained")
    panel(left, rows, PAPER, "published")
    others = pick(rows, source="published", implementation="Linformer")
    series(left, others, "seqlen_q", "published Linformer", y="mib", color="#AAAAAA", markersize=5)
    panel(right, rows, TODAY, "measured")
    ticks = [128, 512, 2048, 8192, 32768]
    for ax, capacity, machine in ((left, 40e9 / MIB, "A100 40 GB"), (right, 139.8 * 1024, "H200")):
        ax.set_yscale("log")
        powers_of_two(ax, ticks)
        ax.axhline(capacity, color="#999999", linewidth=0.8, linestyle=":")
        ax.text(110, capacity * 1.12, f"memory of the {machine}", fontsize=8, color="#555555")
        ax.set(xlabel="sequence length N", xlim=(100, 65536 * 14), ylim=(8, 6e5))
    left.set_ylabel("peak memory, forward + backward (MiB)")
    left.set_title("2022, A100: published and predicted")
    right.set_title("H200, PyTorch 2.11: measured and predicted")
    label_ends(left, ends(rows, PAPER, "published", others))
    label_ends(right, ends(rows, TODAY, "measured"))
    for ax in (left, right):
        key(ax, "H200" if ax is right else None, published=ax is left, loc="lower right")
    note(
        figure,
        "Batch 16, 8 heads, d = 64, fp16, no mask, no dropout. H200: torch.cuda."
        "max_memory_allocated less the 64 MiB workspace of the matrix library.",
    )
    kept = ["source", "implementation", "setup", "seqlen_q", "value", "workspace", "mib", "error"]
    shown = rows[rows["implementation"].isin([*PAPER, *TODAY, "Linformer"])]
    return Drawing(figure, shown[[c for c in kept if c in shown]])


def panel(ax: Axes, rows: pandas.DataFrame, names: dict[str, str], kind: str) -> None:
    """Predicted lines and the points of one set-up."""
    for name in names:
        some = pick(rows, implementation=name)
        curve(ax, some, "seqlen_q", name, COLOUR[name], y="mib", sources=("predicted", kind))


def ends(rows: pandas.DataFrame, names: dict[str, str], kind: str, others: pandas.DataFrame | None = None) -> list[End]:
    """Where the labels go: the last observed point, or the end of the line where none is seen."""
    found = []
    for name, text in names.items():
        known = pick(rows, implementation=name).dropna(subset=["mib"])
        some = pick(known, source=kind)
        if some.empty:
            some = pick(known, source="predicted")
        if len(some):
            last = some.loc[some["seqlen_q"].idxmax()]
            found.append((last["seqlen_q"], last["mib"], text, COLOUR[name]))
    if others is not None and others["mib"].notna().any():
        last = others.loc[others.dropna(subset=["mib"])["seqlen_q"].idxmax()]
        found.append((last["seqlen_q"], last["mib"], "Linformer", "#888888"))
    return found
