"""What a sliding window saves: bytes against its size, and what the tiles load beside it.

Left forward + backward of one head against the keys that a query sees, beside the same window as a
stored mask, which saves nothing and costs N x N elements in every kernel that makes scores, and
beside stored S and P. Right the pairs in the tiles that the forward visits over those that the
window leaves, (Br + Bc ⌈(w - 1) / Bc⌉) / w where Bc divides Br: a window smaller than its query
tile costs what the tile costs.
"""

import matplotlib.pyplot as plt
import pandas

from figures.common import (
    COLOURS,
    FILLED,
    Drawing,
    End,
    curve,
    devices,
    finish,
    key,
    log_axis,
    note,
    pick,
    powers_of_two,
    say,
    series,
)
from repro.claims.options.window import KEYS, excess, totals
from repro.experiments.bytes.sliding_window import EXECUTED, HEAD_DIM, LONGER, OWN, STORED, SUMMED, WINDOWS

EXPERIMENTS = ("sliding-window",)
#: Br x Bc -> colour, from light to dark by what a tile loads.
TILES = {(32, 32): "#56B4E9", (64, 64): "#0072B2", (128, 64): COLOURS["flash"], (128, 128): "#CC79A7"}
WAYS = {"stored mask": ("stored mask, same kernels", "#E69F00"), "standard": ("S and P stored", COLOURS["standard"])}


def both_passes(table: pandas.DataFrame, seqlen: int) -> pandas.DataFrame:
    """Forward + backward with the kernels' own tiles, or as the other ways have them."""
    rows = pick(table, seqlen_q=seqlen)
    kept = rows["way"] != "window"
    for pass_, tile in OWN.items():
        kept |= (rows["pass"] == pass_) & (rows["block_m"] == tile.block_m) & (rows["block_n"] == tile.block_n)
    rows = rows[kept]
    keys = ["source", "way", "window"]
    whole = rows.groupby(keys, as_index=False).agg(
        value=("value", "sum"), lowest=("lowest", "sum"), passes=("pass", "count")
    )
    whole = whole[whole["passes"] == 2].copy()
    whole["megabytes"] = whole["value"] / 1e6
    return whole


def draw(frame: pandas.DataFrame) -> Drawing:
    """Bytes against the window; pairs loaded for a pair that is seen."""
    table = totals(frame)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.0, 4.6), layout="constrained")
    whole = both_passes(table, EXECUTED)
    window = pick(whole, way="window")
    ends: list[End] = []
    ends += curve(left, window, "window", "window", COLOURS["flash"], y="megabytes")
    line = pick(window, source="predicted").sort_values("window")
    if len(line):
        least = line.iloc[-1]["lowest"] / 1e6
        left.plot(WINDOWS, [least] * len(WINDOWS), color=COLOURS["bound"], linewidth=0.9, linestyle=":")
        ends.append((WINDOWS[-1], least, "each tensor once", "#777777"))
    for way, (label, colour) in WAYS.items():
        rows = pick(whole, way=way)
        for value in pick(rows, source="predicted")["megabytes"]:
            left.plot(WINDOWS, [value] * len(WINDOWS), color=colour)
            ends.append((WINDOWS[-1], value, label, colour))
        for value in pick(rows, source="measured")["megabytes"]:
            left.plot([STORED], [value], color=colour, marker="o", **FILLED)
    log_axis(left, "y", [2, 5, 10, 20, 40], ["2", "5", "10", "20", "40"])
    finish(
        left,
        f"forward + backward of one head, N = {EXECUTED}",
        x=WINDOWS,
        ends=ends,
        xlabel="keys that a query sees, w",
        ylabel="bytes across the SM boundary (MB)",
        xlim=(WINDOWS[0] * 0.8, WINDOWS[-1] * 9),
    )
    key(left, "counted, host backend", published=False, loc="center left")

    over = excess(table)
    ends = []
    for (block_m, block_n), colour in TILES.items():
        rows = pick(over, block_m=block_m, block_n=block_n)
        long = pick(rows, seqlen_q=SUMMED, source="predicted")
        name = f"{block_m} × {block_n}"
        drawn = series(right, long, "window", f"predicted {name}", y="excess", color=colour)
        short = pick(rows, seqlen_q=EXECUTED, source="measured")
        if len(short):
            series(right, short, "window", f"counted {name}", y="excess", color=colour)
        if len(drawn):
            ends.append((drawn.iloc[0]["window"], drawn.iloc[0]["excess"], name, colour))
    right.axhline(1, color=COLOURS["bound"], linewidth=0.9, linestyle=":")
    powers_of_two(right, LONGER[::2])
    log_axis(right, "y", [1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"], base=2)
    for x, y, text, colour in ends:
        say(right, text, (x, y), (-6, 0), ha="right", va="center", color=colour)
    right.set(
        xlabel="keys that a query sees, w",
        ylabel="pairs loaded for each that is seen",
        xlim=(LONGER[0] / 4, LONGER[-1] * 1.4),
    )
    right.set_title("forward: the tile beside the window")
    tiles = " and ".join(f"{tile.block_m} × {tile.block_n} ({p})" for p, tile in OWN.items())
    note(
        figure,
        f"One head, d = {HEAD_DIM}, fp16, causal; window=(w - 1, 0). Left: the kernels' own tiles, "
        f"{tiles}; the stored mask is a bias of 0 and -inf.\nRight: query tile × key tile; lines "
        f"at N = {SUMMED}, counted points at N = {EXECUTED}. At w = Br a tile loads two pairs for "
        f"one. {devices(frame)}.",
    )
    kept = ["source", *KEYS, "value", "keys", "pairs", "lowest"]
    return Drawing(figure, table[kept].sort_values([*KEYS, "source"]).reset_index(drop=True))
