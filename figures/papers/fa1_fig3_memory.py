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
    key,
    label_ends,
    note,
    pick,
    powers_of_two,
    series,
    worst,
)
from repro.claims import NOT_MEASURED, Claim, Evidence, agreement, claim

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


def agreement_of(rows: pandas.DataFrame, name: str, kind: str) -> pandas.Series:
    """Observed over predicted MiB, by length; the paper prints whole MB."""
    observed = pick(rows, implementation=name, source=kind).set_index("seqlen_q")["mib"].dropna()
    model = pick(rows, implementation=name, source="predicted").set_index("seqlen_q")["mib"]
    return observed / model.reindex(observed.index)


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """The memory table, the ratio the paper annotates, and the lists behind today's peaks."""
    rows = prepared(frame)
    paper = pandas.concat([agreement_of(rows, name, "published") for name in PAPER])
    today = pandas.concat([agreement_of(rows, name, "measured") for name in TODAY])
    like = []
    for old, new in zip(PAPER, TODAY, strict=True):
        printed, now = (
            pick(rows, implementation=name, source=source).set_index("seqlen_q")["mib"].dropna()
            for name, source in ((old, "published"), (new, "measured"))
        )
        like.append((now / printed).dropna())
    beside = pandas.concat(like)

    def at(name: str, source: str) -> float:
        some = pick(rows, implementation=name, source=source, seqlen_q=4096)["mib"].dropna()
        return float(some.iloc[0]) if len(some) else float("nan")

    printed, model = (
        at("standard", source) / at("flash1", source) for source in ("published", "predicted")
    )
    now = at("standard-eager", "measured") / at("sdpa-flash2", "measured")
    return [
        claim(
            "FA-1 Fig. 3 right",
            predicted=f"4 N² + 10 Nd; 13 Nd + 2 rows: {len(paper)} printed points within "
            f"{abs(worst(paper) - 1):.2%}, integers chosen to match",
            measured=f"{beside.min():.2f} to {beside.max():.2f} of the printed MB at {len(beside)} "
            "lengths (H200, PyTorch's allocator)" if len(beside) else NOT_MEASURED,
            published="Table 21",
            parts=[agreement("measured over printed, worst length", worst(beside), 1, 0.02,
                             Evidence.OTHER, limits=1.5, why="short sequences keep less today",
                             otherwise=agreement("printed over the list, worst", worst(paper), 1,
                                                 0.02, Evidence.PUBLISHED))],
        ),
        claim(
            "FA-1 20x memory",
            predicted=f"{model:.1f}x",
            measured=f"{now:.1f}x (H200)" if now == now else NOT_MEASURED,
            published=f"{printed:.1f}x",
            parts=[agreement("measured ratio at N = 4096 over 20", now, 20, 0.1, Evidence.OTHER,
                             otherwise=agreement("printed ratio over 20", printed, 20, 0.1,
                                                 Evidence.PUBLISHED))],
        ),
        claim(
            "peak memory, lists",
            predicted="lists of live tensors",
            measured=f"{len(today)} points, worst {worst(today) - 1:+.2%} (H200)" if len(today)
            else NOT_MEASURED,
            parts=[agreement("measured over the list, worst length", worst(today), 1, 0.01,
                             Evidence.OTHER)],
        ),
    ]  # fmt: skip
