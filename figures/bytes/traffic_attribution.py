"""Where the bytes of attention go: a bar per algorithm, a segment per tensor and reason.

- compulsory: every input read once, every output written once; no algorithm moves less;
- read again: inputs loaded more than once, the price of tiles;
- intermediates: S, P, dP, dS, and O or dQ while they are still partial;
- statistics: l and m, or lse and delta, fp32 rows.

Hatched: what padding the ragged last tile to a whole one would add; the kernels do not move it.
"""

import math
from collections.abc import Iterator

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from figures.common import FILLED, Drawing, note, pick
from repro.claims import NOT_MEASURED, Claim, Evidence, Part, agreement, claim
from repro.experiments.bytes.traffic_attribution import SEQLEN, TILES
from repro.experiments.shared.attention import STATISTICS

EXPERIMENTS = ("traffic-attribution",)
MB = 1e6
INPUTS = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "out", "dout")}
OUTPUTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
REASONS = {
    "compulsory": "#4D4D4D",
    "read again": "#0072B2",
    "intermediates": "#E69F00",
    "statistics": "#CC79A7",
    "padding avoided": "#FFFFFF",
}
LABELS = {
    ("standard", False): "standard",
    ("flash1-literal", False): "FA-1, Alg. 1 and 4",
    ("flash1-released", False): "FA-1, as released",
    ("flash", False): "queries outside / FA-2",
    ("flash", True): "the same, causal",
}
TENSORS = {"s": "S", "p": "P", "dp": "dP", "ds": "dS", "dq_accum": "dQ fp32"}


def attribute(rows: pandas.DataFrame, pass_: str, operand_bytes: int) -> Iterator[dict]:
    """Split the traffic of one algorithm and pass by reason and tensor.

    operand_bytes: size of one (N, d) operand; all operands have it here. A causal pass may leave
    some rows unread, so what counts as compulsory is at most what moved.
    """
    moved = rows.groupby(["tensor", "direction"])["value"].sum()
    for (tensor, direction), count in moved.items():
        once = 0.0
        if tensor in STATISTICS:
            yield {"reason": "statistics", "tensor": tensor, "value": count}
            continue
        rest = "intermediates"
        if tensor in INPUTS[pass_] and direction == "read":
            once, rest = min(count, operand_bytes), "read again"
        elif tensor in OUTPUTS[pass_] and direction == "write":
            once = min(count, operand_bytes)
        if once:
            yield {"reason": "compulsory", "tensor": tensor, "value": once}
        if count > once:
            yield {"reason": rest, "tensor": tensor, "value": count - once}


def split(frame: pandas.DataFrame, source: str) -> pandas.DataFrame:
    """Long table: implementation, causal, pass, reason, tensor, value (bytes)."""
    rows = pick(frame, source=source, metric="traffic_bytes").dropna(subset=["value"])
    padded = rows["padded_from"].notna() if "padded_from" in rows else rows["value"].isna()
    parts = []
    keys = ["implementation", "causal", "pass"]
    for (name, causal, pass_), some in rows[~padded].groupby(keys):
        operand = SEQLEN * 64 * 2
        parts += [
            {"implementation": name, "causal": causal, "pass": pass_, **part}
            for part in attribute(some, str(pass_), operand)
        ]
    columns = [*keys, "reason", "tensor", "value"]
    table = pandas.DataFrame(parts, columns=columns)
    if source == "predicted":
        whole = (
            rows[padded].groupby(keys)["value"].sum() - rows[~padded].groupby(keys)["value"].sum()
        )
        more = whole.rename("value").reset_index().assign(reason="padding avoided", tensor="all")
        table = pandas.concat([table, more[columns]])
    return table.assign(source=source)


def draw(frame: pandas.DataFrame) -> Drawing:
    """Forward on the left, backward on the right."""
    predicted, measured = split(frame, "predicted"), split(frame, "measured")
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.2), layout="constrained", sharey=True)
    for ax, pass_ in zip(axes, ("forward", "backward"), strict=True):
        sums = pick(predicted, pass_=pass_).groupby(["implementation", "causal"])["value"].sum()
        widest = sums.max() / MB * 1.32 if len(sums) and sums.max() > 0 else 1.0
        ax.set_xlim(0, widest)
        for place, (name, causal) in enumerate(LABELS):
            wanted = {"implementation": name, "causal": causal, "pass_": pass_}
            total, end = bar(ax, -place, pick(predicted, **wanted), widest)
            counted = pick(measured, **wanted)["value"].sum() / MB
            if counted:
                ax.plot(counted, -place, "o", color="black", **{**FILLED, "linestyle": "none"})
            tile = TILES[name, pass_]
            ax.text(end, -place, f"  {total:.2f} MB ({tile.block_m} x {tile.block_n})",
                    va="center", fontsize=8)  # fmt: skip
        ax.set(xlabel="bytes across the SM boundary, one head (MB)")
        ax.set_title(pass_)
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks([-i for i in range(len(LABELS))], list(LABELS.values()))
    handles = [
        Patch(facecolor=colour, edgecolor="#777777", hatch="////" if "padding" in reason else None,
              label=reason) for reason, colour in REASONS.items()
    ]  # fmt: skip
    handles.append(
        axes[1].plot([], [], "o", color="black", **FILLED, label="counted, host backend")[0]
    )
    axes[1].legend(handles=handles, loc="lower right")
    note(figure, f"N = {SEQLEN}, d = 64, fp16, one head; tile rows x keys in brackets. "
         "Bars: exact sums over the tile loop.")  # fmt: skip
    return Drawing(figure, pandas.concat([predicted, measured]).assign(unit="B"))


def bar(ax: Axes, y: float, parts: pandas.DataFrame, widest: float) -> tuple[float, float]:
    """One stacked bar, named where there is room; its end without and with padding, in MB."""
    left = total = 0.0
    for reason, colour in REASONS.items():
        padding = reason == "padding avoided"
        if padding:
            total = left
        for _, part in pick(parts, reason=reason).groupby("tensor", as_index=False):
            width = part["value"].sum() / MB
            ax.barh(y, width, left=left, height=0.62, color=colour, linewidth=0.5,
                    edgecolor="#777777" if padding else "white",
                    hatch="//////" if padding else None)  # fmt: skip
            tensor = str(part["tensor"].iloc[0])
            name = TENSORS.get(tensor, tensor)
            if width > 0.012 * widest * (len(name) + 0.5) and not padding:
                ink = "black" if reason == "intermediates" else "white"
                ax.text(left + width / 2, y, name, ha="center", va="center",
                        fontsize=7, color=ink)  # fmt: skip
            left += width
    return total, left


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """K5: tiles are loaded many times, and yet fewer bytes move."""
    sums = {}
    for source in ("predicted", "measured"):
        table = split(frame, source)
        table = table[(table["reason"] != "padding avoided") & (table["causal"] == False)]  # noqa: E712
        sums[source] = table.groupby(["implementation", "pass"])["value"].sum()
    again = split(frame, "predicted")
    again = pick(again, implementation="flash", causal=False, pass_="forward")
    loads = again.loc[again["tensor"] == "k", "value"].sum() / (SEQLEN * 64 * 2)

    def ratio(source: str) -> float:
        total = sums[source]
        known = {"standard", "flash"} <= set(total.index.get_level_values(0))
        return float(total["standard"].sum() / total["flash"].sum()) if known else math.nan

    counted = ratio("measured")
    return [
        claim(
            "K5",
            predicted=f"{ratio('predicted'):.2f}x fewer, forward + backward, N = {SEQLEN}, each K "
            f"and V tile loaded {loads:.0f} times",
            measured=f"{counted:.2f}x fewer (host backend)" if counted == counted
            else NOT_MEASURED,
            parts=[
                Part(what="bytes of standard attention over flash's, counted", value=counted,
                     low=1.0, evidence=Evidence.COUNTED),
                agreement("the counted ratio over the sums'", counted, ratio("predicted"), 0.0,
                          Evidence.COUNTED),
            ],
        )
    ]  # fmt: skip
