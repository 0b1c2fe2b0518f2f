"""Decoding on DeepSeek's latent as others timed it, and the roofline of reading it once.

FlashMLA's own test as a user ran it on an H100. As long as few rows share the latent the time is
near HBM's, whatever their number; from about 170 on the tensor cores would take longer.
"""

import matplotlib.pyplot as plt
import pandas

from figures.common import COLOURS, Drawing, End, curve, finish, key, note, pick, series
from repro.experiments.papers.mla_published import BATCH, CARD, COLUMNS, KEYS, SHAPES, VALUES

EXPERIMENTS = ("mla-published",)
ROOFS = {"HBM": "#0072B2", "tensor cores": "#E69F00"}
PUBLISHED = "flash-mla"


def times(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Microseconds by source and number of rows, and for published ones how many times HBM's."""
    rows = pick(frame, metric="time_us").dropna(subset=["value"]).copy()
    rows["rows"] = rows["heads"] * rows["seqlen_q"]
    least = pick(rows, implementation="HBM", source="predicted").groupby("rows")["value"].first()
    rows["over"] = rows["value"] / rows["rows"].map(least)
    return rows


def draw(frame: pandas.DataFrame) -> Drawing:
    """Times against the rows that share the latent."""
    table = times(frame)
    figure, ax = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    ends: list[End] = []
    for name, colour in ROOFS.items():
        rows = pick(table, implementation=name, source="predicted").drop_duplicates("rows")
        ends += curve(ax, rows, "rows", name, colour, sources=("predicted",))
    posted = pick(table, implementation=PUBLISHED, source="published")
    series(ax, posted, "rows", "published FlashMLA", color=COLOURS["flash"])
    finish(
        ax,
        "FlashMLA on an H100, and datasheet rooflines",
        x=sorted({heads * width for heads, width in SHAPES}),
        ends=ends,
        xlabel="query heads times queries, which share the latent",
        ylabel="a step (µs)",
        xlim=(13, 256 * 4),
        ylim=(0, None),
    )
    key(ax, None, loc="upper left")
    over = f"{posted['over'].min():.2f} to {posted['over'].max():.2f}" if len(posted) else "no"
    note(
        figure,
        f"{BATCH} sequences of {KEYS} keys, one latent of {COLUMNS} columns, {VALUES} values, "
        f"bf16. Published: FlashMLA's own test, run and\nposted by a user in February 2025, "
        f"{over} times HBM's time. Predicted: each tensor once, datasheet of {CARD.name}.",
    )
    kept = ["source", "implementation", "heads", "seqlen_q", "rows", "value", "over"]
    return Drawing(figure, table.reindex(columns=kept).reset_index(drop=True))
