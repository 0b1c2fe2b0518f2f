"""The price of a deterministic backward pass: bytes moved, scratch memory, products.

Ways to sum dQ over the key tiles: atomic additions, an ordered workspace, a pass of its own with
the queries outside, and on Hopper additions in turns beside additions in any order
(``repro/experiments/bytes/deterministic_price.py``).
"""

from typing import Any

import matplotlib.pyplot as plt
import pandas

from figures.common import COLOURS, FILLED, Drawing, End, curve, key, label_ends, note, pick, powers_of_two
from repro.claims.options.determinism import LONGEST, change, totals
from repro.experiments.bytes.deterministic_price import (
    BASELINES,
    HEAD_DIM,
    HOPPER,
    HOPPER_TILE,
    PRODUCTS,
    QUERY_TILE,
    TILE,
)

EXPERIMENTS = ("deterministic-price",)
NAMES = {
    "flash": "atomic additions",
    "flash-deterministic": "ordered workspace",
    "flash-split": "separate pass",
    "flash-sm90": "atomic additions (Hopper)",
    "flash-sm90-deterministic": "in turns (Hopper)",
}
BARS = {
    "flash": "atomic\nadditions",
    "flash-deterministic": "ordered\nworkspace",
    "flash-split": "separate\npass",
    "flash-sm90": "atomic\nadditions",
    "flash-sm90-deterministic": "additions\nin turns",
}
#: The curves: one atomic addition stands for both, whose bytes and scratch differ by little.
CURVES = ("flash", *BASELINES)
COLOUR = {
    "flash": COLOURS["flash"],
    "flash-deterministic": COLOURS["flash-deterministic"],
    "flash-split": "#0072B2",
    "flash-sm90-deterministic": "#006B4F",
}
#: Drawn over the curve of the additions whose bytes and scratch it all but shares.
DASHED: dict[str, Any] = {"flash-sm90-deterministic": {"linestyle": (0, (3, 2)), "zorder": 3}}
SMALL: dict[str, Any] = {"flash-sm90-deterministic": {"markersize": 4, "zorder": 4}}
#: What the bytes are, from the bottom of a bar up.
PARTS = {
    "q, dout": "#9ECAE1",
    "k, v": "#3182BD",
    "dq sums (fp32)": "#CC79A7",
    "gradients out": "#74C476",
    "rest": "#BDBDBD",
}


def part(tensor: str) -> str:
    """The part of a bar that a tensor's bytes belong to."""
    names = {"q": "q, dout", "dout": "q, dout", "k": "k, v", "v": "k, v"}
    names |= {"dq_accum": "dq sums (fp32)"}
    names |= dict.fromkeys(("dq", "dk", "dv"), "gradients out")
    return names.get(tensor, "rest")


def draw(frame: pandas.DataFrame) -> Drawing:
    """Where the bytes go at one length; bytes against N; scratch against N."""
    table = totals(frame)
    table["megabytes"] = table["value"] / 1e6
    figure, (bars, lines, scratch) = plt.subplots(
        1, 3, figsize=(13.5, 4.6), layout="constrained", width_ratios=(1.4, 1, 1)
    )

    traffic = pick(frame, metric="traffic_bytes", seqlen_q=LONGEST, causal=False)
    predicted = pick(traffic, source="predicted")
    shares = predicted.groupby(["implementation", predicted["tensor"].map(part)])["value"].sum()
    whole = predicted.groupby("implementation")["value"].sum() / 1e6
    for place, algorithm in enumerate(NAMES):
        bottom = 0.0
        for what, colour in PARTS.items():
            height = float(shares.get((algorithm, what), 0.0)) / 1e6
            bars.bar(place, height, 0.6, bottom, color=colour, label=what if not place else None)
            bottom += height
        counted = pick(traffic, source="measured", implementation=algorithm)["value"].sum() / 1e6
        if counted:
            bars.plot(place, counted, color="black", **{**FILLED, "marker": "o"})
        told = f"{bottom:.1f} MB"
        if algorithm in BASELINES:
            told += f"\n{change(bottom, whole.get(BASELINES[algorithm], float('nan')))}"
        bars.text(place, bottom + 0.25, told, ha="center", fontsize=8)
    labels = [f"{BARS[algorithm]}\n{PRODUCTS[algorithm]} products" for algorithm in NAMES]
    bars.set_xticks(range(len(NAMES)), labels)
    border = len(NAMES) - len(HOPPER) - 0.5
    bars.axvline(border, color="#999999", linewidth=0.8)
    bars.text(border + 0.1, 0.98, "Hopper kernels", va="top", transform=bars.get_xaxis_transform())
    bars.grid(axis="x", visible=False)
    bars.set(ylabel="bytes across the SM boundary (MB)", ylim=(0, bars.get_ylim()[1] * 1.36))
    bars.set_title(f"backward at N = {LONGEST}")
    order = dict(zip(*bars.get_legend_handles_labels()[::-1], strict=True))
    bars.legend(order.values(), order.keys(), loc="upper left", ncols=2)

    dense = pick(table, causal=False).copy()
    keys = ["source", "implementation", "seqlen_q"]
    known = dense.set_index(keys)["value"].to_dict()
    dense["ratio"] = [
        value / (known.get((source, BASELINES.get(name, name), seqlen)) or float("nan"))
        for (source, name, seqlen), value in known.items()
    ]
    sums = pick(frame, metric="scratch_bytes", causal=False).copy()
    sums["megabytes"] = sums["value"] / 1e6
    for ax, rows, y in ((lines, dense, "ratio"), (scratch, sums, "megabytes")):
        ends: list[End] = []
        for algorithm in CURVES:
            some = pick(rows, implementation=algorithm)
            looks: dict[str, Any] = {"line": DASHED.get(algorithm), "points": SMALL.get(algorithm)}
            ends += curve(ax, some, "seqlen_q", NAMES[algorithm], COLOUR[algorithm], y=y, **looks)
        ticks = sorted(rows["seqlen_q"].unique())
        if ax is scratch:
            ax.set_yscale("log")
        else:
            ax.set_ylim(0, 1.65)
        powers_of_two(ax, ticks[::2])
        ax.set_xlim(ticks[0] * 0.8, ticks[-1] * 22)
        ax.set(xlabel="sequence length N")
        label_ends(ax, ends)
    lines.set_title("bytes against N, atomic additions = 1")
    lines.set_ylabel("bytes, relative to atomic additions")
    scratch.set_title("scratch memory against N")
    scratch.set_ylabel("delta and sums of dQ (MB)")
    key(lines, "counted, host backend", published=False, loc="lower left")
    note(
        figure,
        f"One head, d = {HEAD_DIM}, fp16, tiles {TILE.block_m} × {TILE.block_n} (the separate pass "
        f"{QUERY_TILE.block_m} × {QUERY_TILE.block_n}, Hopper {HOPPER_TILE.block_m} × "
        f"{HOPPER_TILE.block_n}), not causal. Black points: bytes counted by executing the "
        "kernels. Products are of Nq · Nk · d multiply-adds each.\nIn turns: a counter for each "
        "query tile is read and written once a visit; waiting for a turn costs time, which is not "
        "shown. Per cents and the middle panel: over atomic additions of the same kernels.",
    )
    kept = ["source", "implementation", "causal", "seqlen_q", "value", "metric", "unit"]
    bytes_ = table.drop(columns="megabytes").assign(metric="traffic_bytes", unit="B")
    return Drawing(figure, pandas.concat([bytes_, sums[kept]], ignore_index=True)[kept])
