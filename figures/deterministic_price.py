"""The price of a deterministic backward pass: bytes moved, scratch memory, products.

Three ways to sum dQ over the key tiles: atomic additions, an ordered workspace, a pass of its own
with the queries outside (``repro/experiments/deterministic_price.py``).
"""

import matplotlib.pyplot as plt
import pandas

from figures.common import (
    COLOURS,
    FILLED,
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
from repro.experiments.deterministic_price import EXECUTED, HEAD_DIM, PRODUCTS, QUERY_TILE, TILE

EXPERIMENTS = ("deterministic-price",)
NAMES = {
    "flash": "atomic additions",
    "flash-deterministic": "ordered workspace",
    "flash-split": "separate pass",
}
COLOUR = {
    "flash": COLOURS["flash"],
    "flash-deterministic": COLOURS["flash-deterministic"],
    "flash-split": "#0072B2",
}
#: What the bytes are, from the bottom of a bar up.
PARTS = {
    "q, dout": "#9ECAE1",
    "k, v": "#3182BD",
    "dq sums (fp32)": "#CC79A7",
    "gradients out": "#74C476",
    "rest": "#BDBDBD",
}
LONGEST = EXECUTED[-1]


def part(tensor: str) -> str:
    """The part of a bar that a tensor's bytes belong to."""
    names = {"q": "q, dout", "dout": "q, dout", "k": "k, v", "v": "k, v"}
    names |= {"dq_accum": "dq sums (fp32)"}
    names |= dict.fromkeys(("dq", "dk", "dv"), "gradients out")
    return names.get(tensor, "rest")


def totals(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes per source, algorithm, length and mask."""
    rows = pick(frame, metric="traffic_bytes")
    keys = ["source", "implementation", "causal", "seqlen_q"]
    return rows.groupby(keys, as_index=False)["value"].sum()


def draw(frame: pandas.DataFrame) -> Drawing:
    """Where the bytes go at one length; bytes against N; scratch against N."""
    table = totals(frame)
    table["megabytes"] = table["value"] / 1e6
    figure, (bars, lines, scratch) = plt.subplots(
        1, 3, figsize=(12, 4.4), layout="constrained", width_ratios=(1.05, 1, 1)
    )

    traffic = pick(frame, metric="traffic_bytes", seqlen_q=LONGEST, causal=False)
    predicted = pick(traffic, source="predicted")
    shares = predicted.groupby(["implementation", predicted["tensor"].map(part)])["value"].sum()
    for place, algorithm in enumerate(NAMES):
        bottom = 0.0
        for what, colour in PARTS.items():
            height = float(shares.get((algorithm, what), 0.0)) / 1e6
            bars.bar(place, height, 0.6, bottom, color=colour, label=what if not place else None)
            bottom += height
        counted = pick(traffic, source="measured", implementation=algorithm)["value"].sum() / 1e6
        if counted:
            bars.plot(place, counted, color="black", **{**FILLED, "marker": "o"})
        bars.text(place, bottom + 0.25, f"{bottom:.1f} MB", ha="center", fontsize=8)
    labels = [f"{name}\n{PRODUCTS[algorithm]} products" for algorithm, name in NAMES.items()]
    bars.set_xticks(range(len(NAMES)), labels)
    bars.grid(axis="x", visible=False)
    bars.set(ylabel="bytes across the SM boundary (MB)", ylim=(0, bars.get_ylim()[1] * 1.28))
    bars.set_title(f"backward at N = {LONGEST}")
    order = dict(zip(*bars.get_legend_handles_labels()[::-1], strict=True))
    bars.legend(order.values(), order.keys(), loc="upper left", ncols=2)

    dense = pick(table, causal=False).copy()
    base = dense.drop_duplicates().pivot_table(
        index=["source", "seqlen_q"], columns="implementation", values="value"
    )["flash"]
    dense["ratio"] = [
        value / base.get((source, seqlen), float("nan"))
        for value, source, seqlen in zip(
            dense["value"], dense["source"], dense["seqlen_q"], strict=True
        )
    ]
    sums = pick(frame, metric="scratch_bytes", causal=False).copy()
    sums["megabytes"] = sums["value"] / 1e6
    for ax, rows, what, y in (
        (lines, dense, "bytes", "ratio"),
        (scratch, sums, "scratch", "megabytes"),
    ):
        ends = []
        for algorithm, name in NAMES.items():
            some, colour = pick(rows, implementation=algorithm), COLOUR[algorithm]
            line = series(ax, pick(some, source="predicted"), "seqlen_q",
                          f"predicted {what} of {algorithm}", y=y, color=colour)  # fmt: skip
            series(ax, pick(some, source="measured"), "seqlen_q",
                   f"counted {what} of {algorithm}", y=y, color=colour)  # fmt: skip
            if len(line):
                end = line.iloc[-1]
                ends.append((end["seqlen_q"], end[y], name, colour))
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
        f"{QUERY_TILE.block_m} × {QUERY_TILE.block_n}), not causal. Black points: bytes counted by "
        "executing the kernels. Products are of Nq · Nk · d multiply-adds each.",
    )
    kept = ["source", "implementation", "causal", "seqlen_q", "value", "metric", "unit"]
    bytes_ = table.drop(columns="megabytes").assign(metric="traffic_bytes", unit="B")
    return Drawing(figure, pandas.concat([bytes_, sums[kept]], ignore_index=True)[kept])


def verdicts(frame: pandas.DataFrame) -> list[Verdict]:
    """What determinism costs in bytes, and that the count is the prediction."""
    table = totals(frame).pivot_table(
        index=["implementation", "causal", "seqlen_q"], columns="source", values="value"
    )
    ratio = table["measured"] / table["predicted"] if "measured" in table else pandas.Series()
    exact = worst(ratio)

    def against_atomic(algorithm: str, source: str) -> str:
        try:
            ours, base = (
                table.loc[(name, False, LONGEST), source] for name in (algorithm, "flash")
            )
        except KeyError:
            return "not measured"
        return f"{ours / base - 1:+.0%}" if ours == ours else "not measured"

    def both(source: str) -> str:
        parts = (against_atomic(n, source) for n in ("flash-deterministic", "flash-split"))
        return " and ".join(parts)

    return [
        Verdict(
            "determinism",
            f"bytes of an ordered workspace and of a separate dQ pass over atomics, N={LONGEST}",
            both("predicted"),
            both("measured"),
            "",
            "open (not measured)" if exact != exact
            else f"holds (counted / predicted {exact:.3f})" if exact == 1
            else f"does not hold (counted / predicted {exact:.3f})",
            "make figures/out/deterministic_price.svg",
        )
    ]  # fmt: skip
