"""What padding costs: bytes and time of real lengths, padded or packed one after another.

Left and middle forward + backward of one head for each token that is no padding, against the
sequences in a batch: padded to the dataset's limit, padded to the longest of the batch, and packed,
which does not depend on the batch. Lengths are drawn from the histograms of two datasets (Krell et
al. 2021). Right the time of a padded batch over that of the packed one, rooflines of an A100.
"""

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import COLOURS, Drawing, curve, devices, finish, key, note, pick, powers_of_two, say, series
from repro.claims.options.packed import KEYS, totals
from repro.experiments.bytes.packed_sequences import ALL_SIZES, EXECUTED, HEAD_DIM, HEADS, TIMED, TIMED_SIZES
from repro.measuring.lengths import DRAWN, LIMITS, SEED

EXPERIMENTS = ("packed-sequences",)
NAMES = {"wikipedia": "Wikipedia", "squad-1.1": "SQuAD 1.1"}
WAYS = {
    "limit": ("padded to the limit", "#E69F00"),
    "longest": ("padded to the longest", "#0072B2"),
    "packed": ("packed", COLOURS["flash"]),
}


def times(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Time of a padded batch over that of the packed one; columns ``way``, ``ratio``."""
    rows = pick(frame, metric="time_ms", source="predicted")
    if not len(rows):
        return pandas.DataFrame(columns=["source", "dataset", "way", "batch", "ratio"])
    packed = pick(rows, way="packed").set_index(["dataset", "batch"])["value"].rename("packed")
    found = rows[rows["way"] != "packed"].join(packed, on=["dataset", "batch"])
    found = found.assign(ratio=found["value"] / found["packed"])
    return found[["source", "dataset", "way", "batch", "ratio"]]


def _bytes(ax: Axes, table: pandas.DataFrame, dataset: str) -> None:
    ends = []
    rows = pick(table, dataset=dataset)
    for way, (label, colour) in WAYS.items():
        some = pick(rows, way=way)
        some = some[(some["source"] == "measured") | (some["sequences"] == DRAWN)]
        sources = ("predicted",) if way == "limit" else ("predicted", "measured")
        ends += curve(ax, some, "batch", label, colour, y="per_token", sources=sources)
    least = pick(rows, way="packed", source="predicted", sequences=DRAWN)
    if len(least):
        value = least.iloc[0]["lowest"] / least.iloc[0]["tokens"] / 1e3
        ax.plot(ALL_SIZES, [value] * len(ALL_SIZES), color=COLOURS["bound"], linewidth=0.9, linestyle=":")
        ends.append((ALL_SIZES[-1], value, "each tensor once", "#777777"))
    title, limits = f"{NAMES[dataset]}, up to {LIMITS[dataset]} tokens", (ALL_SIZES[0] / 1.3, ALL_SIZES[-1] * 24)
    finish(ax, title, x=ALL_SIZES, ends=ends, xlabel="sequences in a batch", ylim=(0, 10.5), xlim=limits)


def draw(frame: pandas.DataFrame) -> Drawing:
    """Bytes for a token of each dataset; the time of padding."""
    table, time = totals(frame), times(frame)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13.0, 4.6), layout="constrained")
    for ax, dataset in ((left, "wikipedia"), (middle, "squad-1.1")):
        _bytes(ax, table, dataset)
    left.set_ylabel("bytes across the SM boundary for a real token (kB)")
    key(middle, "counted, host backend", published=False, loc="center right")

    for dataset, style in (("wikipedia", "-"), ("squad-1.1", "--")):
        ends = []
        for way in ("limit", "longest"):
            label, colour = WAYS[way]
            rows = pick(time, dataset=dataset, way=way)
            line = series(right, rows, "batch", f"time, {dataset}, {label}", y="ratio", color=colour, linestyle=style)
            if len(line):
                text = f"{NAMES[dataset]}, {label.removeprefix('padded ')}"
                ends.append((TIMED_SIZES[0], line.iloc[0]["ratio"], text, colour))
        above = "bottom" if style == "--" else "top"
        for x, y, text, colour in ends:
            say(right, text, (x, y), (-5, 0), ha="right", va=above, color=colour)
    right.axhline(1, color=COLOURS["bound"], linewidth=0.9, linestyle=":")
    powers_of_two(right, TIMED_SIZES)
    right.set(
        xlabel="sequences in a batch",
        ylabel="time of padded over packed (rooflines)",
        ylim=(0, None),
        xlim=(TIMED_SIZES[0] / 24, TIMED_SIZES[-1] * 1.4),
    )
    right.set_title(f"A100, {HEADS} heads")
    note(
        figure,
        "Lengths drawn (seed "
        f"{SEED}) from the histograms that Krell et al. 2021 published: Wikipedia as BERT is "
        "trained on it, and SQuAD 1.1. Forward + backward,\n"
        f"d = {HEAD_DIM}, fp16, no causal mask; a key mask hides padding. Lines: {DRAWN} "
        f"sequences; counted points: the first {EXECUTED}, with the bytes predicted for them; "
        f"times: the first {TIMED}, each tensor once in HBM. {devices(frame)}.",
    )
    kept = table.assign(panel="bytes")
    ratios = time.assign(panel="time", sequences=TIMED).rename(columns={"ratio": "per_token"})
    listed = pandas.concat([part for part in (kept, ratios) if len(part)] or [kept])
    columns = ["panel", "source", *KEYS, "value", "tokens", "lowest", "per_token"]
    return Drawing(figure, listed.reindex(columns=columns).reset_index(drop=True))
