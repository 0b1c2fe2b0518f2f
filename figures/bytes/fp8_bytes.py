"""What K and V in fp8 save in a forward, and what they cost: bytes, and error with an outlier.

Left the bytes that cross the SM boundary for one head in e4m3 over those in 16 bits, against the
number of queries: half where K and V dominate, more where q and out come to weigh. Right the error
of queries that do not see an outlier among the keys and values, against its size: with a scale a
head it sets everybody's, with a scale a block that of its own block alone.
"""

import matplotlib.pyplot as plt
import pandas

from figures.common import COLOURS, FILLED, Drawing, curve, devices, finish, key, label_ends, log_axis, note, pick
from repro.experiments.bytes.fp8_bytes import (
    BLOCK,
    HEAD_DIM,
    JUDGED,
    KEYS,
    LONGER,
    MORE_QUERIES,
    OUTLIERS,
    TOKENS,
    WAYS,
)

EXPERIMENTS = ("fp8-bytes",)
COLOUR = {"scale a head": "#E69F00", "scale a block": COLOURS["flash"]}
EIGHT = [way for way, (fp8, _) in WAYS.items() if fp8]


def ratios(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes of a forward in e4m3 over those in 16 bits, by source, keys, way and queries."""
    columns = ["source", "seqlen_k", "way", "seqlen_q"]
    if "way" not in frame:
        return pandas.DataFrame(columns=[*columns, "value", "sixteen", "share"])
    rows = pick(frame, metric="traffic_bytes").dropna(subset=["value"])
    totals = rows.groupby(columns, as_index=False)["value"].sum()
    sixteen = pick(totals, way="16 bits").drop(columns="way")
    sixteen = sixteen.rename(columns={"value": "sixteen"})
    found = totals[totals["way"].isin(EIGHT)].merge(sixteen, on=["source", "seqlen_k", "seqlen_q"])
    found["share"] = found["value"] / found["sixteen"]
    return found


def errors(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Errors, root mean square, against the outlier's size."""
    if "outlier" not in frame:
        return pandas.DataFrame(columns=["source", "way", "outlier", "value"])
    rows = pick(frame, metric="rounding_error").dropna(subset=["outlier", "value"])
    return rows[["source", "way", "outlier", "value"]].copy()


def draw(frame: pandas.DataFrame) -> Drawing:
    """Bytes in e4m3 over those in 16 bits; the error that rounding leaves."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.0, 4.4), layout="constrained")
    share, ends = ratios(frame), []
    for keys, dashes in ((LONGER, "-"), (KEYS, "--")):
        for way, colour in COLOUR.items():
            rows = pick(share, way=way, seqlen_k=keys)
            sources = ("predicted", "measured") if keys == KEYS else ("predicted",)
            end = curve(left, rows, "seqlen_q", way, colour, y="share", sources=sources, line={"linestyle": dashes})
            if way == EIGHT[-1]:
                ends += [(x, y, f"{keys} keys", "#555555") for x, y, _, _ in end]
    left.axhline(0.5, color=COLOURS["bound"], linewidth=0.9, linestyle=":")
    finish(
        left,
        "forward of one head, SM boundary",
        x=MORE_QUERIES[::2],
        ends=ends,
        xlabel="queries, Nq",
        ylabel="bytes in e4m3 over bytes in 16 bits",
        ylim=(0.45, 0.65),
        xlim=(MORE_QUERIES[0] * 0.7, MORE_QUERIES[-1] * 12),
    )
    key(left, "counted, host backend", published=False, loc="upper left")

    lost, ends = errors(frame), []
    for way, colour in COLOUR.items():
        rows = pick(lost, way=way, source="measured").sort_values("outlier")
        if rows.empty:
            continue
        right.plot(rows["outlier"], rows["value"], color=colour, linewidth=0.8, linestyle=":")
        right.plot(rows["outlier"], rows["value"], color=colour, marker="o", **FILLED)
        text = way if way == "scale a head" else f"scale for {BLOCK} keys"
        ends.append((rows.iloc[-1]["outlier"], rows.iloc[-1]["value"], text, colour))
    log_axis(right, "x", OUTLIERS[::2], [f"$2^{{{2 * i}}}$" for i in range(0, len(OUTLIERS), 2)], base=2)
    right.set_yscale("log")
    right.set(
        xlabel="size of the last token's key and value, the others 1",
        ylabel="error of out, root mean square",
        xlim=(0.6, OUTLIERS[-1] * 100),
    )
    right.set_title("queries that do not see the outlier")
    label_ends(right, ends)
    note(
        figure,
        f"d = {HEAD_DIM}, fp16 queries; scales are fp32, of a head or of {BLOCK} keys. Left: whole "
        "lines 65536 keys, broken ones 1024, which were executed and counted.\nRight: executed, "
        f"causal, {TOKENS} tokens, the first {JUDGED} queries, against float64 attention of the "
        f"numbers before rounding. {devices(frame)}.",
    )
    table = pandas.concat([share, lost.rename(columns={"value": "error"})], ignore_index=True)
    kept = ["source", "way", "seqlen_k", "seqlen_q", "value", "share", "outlier", "error"]
    table = table.reindex(columns=kept)
    return Drawing(figure, table.sort_values([*kept[:4], "outlier"]).reset_index(drop=True))
