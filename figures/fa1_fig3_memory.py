"""FlashAttention 2022, Fig. 3 right: peak memory of one forward + backward against N.

Left the paper's run (Table 21), right the same shape on an H200 with PyTorch 2.11. Lines are sums
of the tensors alive at the peak, with no constant fitted. On the H200 the matrix library's
workspace, allocated before the pass, is taken off; the paper's table is shown as printed.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import (
    COLOURS,
    Drawing,
    Verdict,
    key,
    label_ends,
    note,
    pick,
    powers_of_two,
    series,
    worst,
)
from figures.verdict_table import judged

EXPERIMENTS = ("fig3-memory",)
MIB = 2**20
#: q, k, v and dout are there before the pass; the rest of "allocated before" is the workspace.
INPUTS = 4
PAPER = {"standard": "standard", "flash1": "FlashAttention"}
TODAY = {"standard-eager": "standard (eager)", "sdpa-flash2": "FlashAttention-2 (sdpa)"}
COLOUR = {
    "standard": COLOURS["standard"],
    "standard-eager": COLOURS["standard"],
    "flash1": COLOURS["flash1"],
    "sdpa-flash2": COLOURS["flash"],
}


def prepared(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Rows of the plain run in MiB, workspace taken off where it is on record."""
    rows = pick(frame, metric="peak_memory_bytes", dropout=0.0, key_mask=False).copy()
    operand = rows["batch"] * rows["heads"] * rows["seqlen_q"] * rows["head_dim"] * 2
    before = rows["allocated_before_bytes"] if "allocated_before_bytes" in rows else float("nan")
    rows["workspace"] = (before - INPUTS * operand).fillna(0.0)
    rows["mib"] = (rows["value"] - rows["workspace"]) / MIB
    return rows


def draw(frame: pandas.DataFrame) -> Drawing:
    """2022 on the left, today on the right, the same axes."""
    rows = prepared(frame)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.8, 4.4), sharey=True, layout="constrained"
    )
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
    note(figure, "Batch 16, 8 heads, d = 64, fp16, no mask, no dropout. H200: torch.cuda."
         "max_memory_allocated less the 64 MiB workspace of the matrix library.")  # fmt: skip
    kept = ["source", "implementation", "setup", "seqlen_q", "value", "workspace", "mib", "error"]
    shown = rows[rows["implementation"].isin([*PAPER, *TODAY, "Linformer"])]
    return Drawing(figure, shown[[c for c in kept if c in shown]])


def panel(ax: Axes, rows: pandas.DataFrame, names: dict[str, str], kind: str) -> None:
    """Predicted lines and the points of one set-up."""
    for name in names:
        colour = COLOUR[name]
        some = pick(rows, implementation=name)
        series(ax, pick(some, source="predicted"), "seqlen_q", f"predicted {name}", y="mib",
               color=colour)  # fmt: skip
        series(ax, pick(some, source=kind), "seqlen_q", f"{kind} {name}", y="mib", color=colour)


def ends(
    rows: pandas.DataFrame,
    names: dict[str, str],
    kind: str,
    others: pandas.DataFrame | None = None,
) -> list[tuple[float, float, str, str]]:
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


def agreement(rows: pandas.DataFrame, name: str, kind: str) -> pandas.Series:
    """Observed over predicted MiB, by length; the paper prints whole MB."""
    observed = pick(rows, implementation=name, source=kind).set_index("seqlen_q")["mib"].dropna()
    model = pick(rows, implementation=name, source="predicted").set_index("seqlen_q")["mib"]
    return observed / model.reindex(observed.index)


def verdicts(frame: pandas.DataFrame) -> list[Verdict]:
    """The memory table, and the ratio the paper annotates."""
    rows = prepared(frame)
    paper = pandas.concat([agreement(rows, name, "published") for name in PAPER])
    today = pandas.concat([agreement(rows, name, "measured") for name in TODAY])

    def at(name: str, source: str) -> float:
        some = pick(rows, implementation=name, source=source, seqlen_q=4096)["mib"]
        return float(some.iloc[0]) if len(some) else float("nan")

    names = ("standard", "flash1")
    printed, model = (
        at(names[0], source) / at(names[1], source) for source in ("published", "predicted")
    )
    now = at("standard-eager", "measured") / at("sdpa-flash2", "measured")
    return [
        Verdict(
            "FA-1 Fig. 3 right",
            f"peak memory, standard and flash, {len(paper)} printed points",
            "4 N² + 10 Nd; 13 Nd + 2 rows",
            f"H200: 4 N² + 6 Nd; 12 Nd + 2 rows, {len(today)} points within "
            f"{abs(worst(today) - 1):.2%}",
            "Table 21",
            judged(worst(paper), 1.0, 0.02).replace("(", "(worst printed point "),
            "make figures/out/fa1_fig3_memory.svg",
        ),
        Verdict(
            "FA-1 20x memory",
            "20x less memory than standard attention at N = 4096",
            f"{model:.1f}x",
            f"{now:.1f}x (H200, workspace taken off)",
            f"{printed:.1f}x",
            judged(printed, model, 0.01),
            "make figures/out/fa1_fig3_memory.svg",
        ),
    ]
