"""FlashAttention 2022, Fig. 2 left, as a table drawn to scale: traffic and FLOPs of both passes.

Two findings. The printed traffic fits lists of kernels (18 N² + 12 N d for standard attention with
mask and dropout, 33 N d for FlashAttention), integers chosen to match: the released FlashAttention
moves 45 N d across the SM boundary. What PyTorch moves today is such a list, by hardware counters.
The printed GFLOPs do not follow from the stated shape: batch 64 and 16 heads make 12 times as many.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes

from figures.common import COLOURS, FILLED, HOLLOW, Drawing, key, note, pick
from repro.claims import NOT_MEASURED, Claim, Evidence, agreement, claim
from repro.experiments.papers.fig2_left import SHAPE
from repro.experiments.shared.attention import STATISTICS

EXPERIMENTS = ("fig2-left", "fig2-left-traffic", "fig2-left-traffic-masked")
GB = 1e9
COMMAND = "make figures/out/fa1_fig2_left.svg"


@dataclass(frozen=True)
class Row:
    """One line: what it is, and its numbers in GB (or GFLOP); absent ones are None."""

    label: str
    colour: str
    predicted: float | None = None
    measured: float | None = None
    published: float | None = None
    by: str = ""


def one(rows: pandas.DataFrame, **wanted: object) -> float | None:
    """The sum of the rows that match, in 1e9 units; None where there are none."""
    found = pick(rows, **wanted)["value"].dropna()
    return float(found.sum()) / GB if len(found) else None


def counted(frame: pandas.DataFrame, source: str, name: str, statistics: bool) -> float | None:
    """Traffic of one algorithm's kernels at the SM boundary."""
    rows = pick(frame, experiment="fig2-left", metric="traffic_bytes")
    if not statistics:
        rows = rows[~rows["tensor"].isin(STATISTICS)]
    return one(rows, source=source, implementation=name)


def traffic_rows(frame: pandas.DataFrame) -> Iterator[Row]:
    """Standard attention first, then FlashAttention."""
    lists = pick(frame, source="predicted", metric="hbm_bytes")
    paper = pick(frame, source="published", metric="hbm_bytes", implementation="standard")
    flash = pick(frame, source="published", metric="hbm_bytes", implementation="flash1")
    arxiv = paper["origin"].str.contains("arXiv")
    gpu = frame[frame["metric"].isin(["hbm_read_bytes", "hbm_write_bytes"])]
    orange, blue, green = COLOURS["standard"], COLOURS["flash1"], COLOURS["flash"]
    yield Row("paper, mask and dropout: 18 N² + 12 Nd", orange,
              one(lists, variant="paper-masked-dropout"), None, one(paper[arxiv]))  # fmt: skip
    yield Row("paper (NeurIPS), mask: 16 N² + 12 Nd", orange,
              one(lists, variant="paper-masked-split-softmax"), None,
              one(paper[~arxiv]))  # fmt: skip
    yield Row("PyTorch 2.11 eager, no mask: 18 N² + 14 Nd", orange, one(lists, variant="eager"),
              one(gpu, experiment="fig2-left-traffic", implementation="standard-eager"), None,
              "H200, HBM")  # fmt: skip
    yield Row("PyTorch 2.11 eager, mask, dropout: 25 N² + 14 Nd", orange,
              one(lists, variant="eager-masked-dropout"),
              one(gpu, experiment="fig2-left-traffic-masked"), None, "H200, HBM")  # fmt: skip
    yield Row("three and five kernels, tiles re-read", orange,
              counted(frame, "predicted", "standard", True),
              counted(frame, "measured", "standard", True), None, "host backend, SM")  # fmt: skip
    yield Row("FlashAttention, no first read-back: 33 Nd", blue,
              counted(frame, "predicted", "flash1-skip-first", False),
              counted(frame, "measured", "flash1-skip-first", False),
              one(flash[flash["origin"].str.contains("arXiv")]), "host backend, SM")  # fmt: skip
    yield Row("FlashAttention as released: 45 Nd", blue,
              counted(frame, "predicted", "flash1-released", False),
              counted(frame, "measured", "flash1-released", False), None,
              "host backend, SM")  # fmt: skip
    yield Row("queries outside, tiles re-read", green, counted(frame, "predicted", "flash", True),
              counted(frame, "measured", "flash", True), None, "host backend, SM")  # fmt: skip
    yield Row("FlashAttention-2 in PyTorch 2.11: 25 Nd", green,
              one(lists, implementation="sdpa-flash2"),
              one(gpu, experiment="fig2-left-traffic", implementation="sdpa-flash2"), None,
              "H200, HBM")  # fmt: skip


def flop_rows(frame: pandas.DataFrame) -> Iterator[Row]:
    """Six and seven matrix products of the stated shape against what is printed."""
    rows = pick(frame, metric="flops")
    for name, label in (("standard", "standard: 6 products"), ("flash1", "flash: 7 products")):
        some = pick(rows, implementation=name)
        printed = pick(some, source="published")["value"]
        yield Row(label, COLOURS[name], one(some, source="predicted"), None,
                  float(printed.iloc[0]) / GB if len(printed) else None)  # fmt: skip


def draw(frame: pandas.DataFrame) -> Drawing:
    """Traffic above, FLOPs below."""
    traffic, flops = list(traffic_rows(frame)), list(flop_rows(frame))
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(11.6, 5.0), height_ratios=(len(traffic), len(flops) + 0.6),
        layout="constrained",
    )  # fmt: skip
    panel(top, traffic, "GB")
    panel(bottom, flops, "GFLOP")
    top.set(xlim=(1.5, 1500), xlabel="bytes moved, forward + backward (GB)")
    top.set_xticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
    top.set_title("Printed traffic fits a list of kernels; counters confirm today's list")
    bottom.set(xlim=(20, 90000), xlabel="matrix products, forward + backward (GFLOP)")
    bottom.set_xticks([100, 1000], ["100", "1000"])
    bottom.set_title("Printed GFLOPs are not those of the stated batch and heads")
    key(top, "machine named", loc="upper left")
    note(figure, "FlashAttention 2022, Fig. 2 left: N = 1024, d = 64, 16 heads, batch 64, fp16. "
         "SM: across the SM boundary, one head executed, times 1024.")  # fmt: skip
    table = pandas.DataFrame([
        {"quantity": unit, "row": r.label, "predicted": r.predicted, "measured": r.measured,
         "measured_by": r.by if r.measured is not None else None, "published": r.published}
        for unit, rows in (("traffic, GB", traffic), ("FLOPs, GFLOP", flops)) for r in rows
    ])  # fmt: skip
    return Drawing(figure, table)


def panel(ax: Axes, rows: list[Row], unit: str) -> None:
    """A line per row: a bar for predicted, a point for measured, a ring for published, numbers."""
    for place, row in enumerate(rows):
        if row.predicted is not None:
            ax.plot([row.predicted] * 2, [-place - 0.3, -place + 0.3], color=row.colour, lw=2)
        if row.measured is not None:
            ax.plot(row.measured, -place, "o", color=row.colour, **FILLED)
        if row.published is not None:
            ax.plot(row.published, -place, "o", color=COLOURS["published"], **HOLLOW)
        digits = 2 if unit == "GB" else 1
        parts = [
            f"{name} {value:.{digits}f}"
            for name, value in (("predicted", row.predicted), ("published", row.published))
            if value is not None
        ]
        if row.measured is not None:
            parts.insert(1, f"measured {row.measured:.{digits}f} ({row.by})")
        ax.text(0.56, -place, " · ".join(parts), transform=ax.get_yaxis_transform(), va="center",
                fontsize=8)  # fmt: skip
    ax.set_xscale("log")
    ax.set_yticks([-i for i in range(len(rows))], [r.label for r in rows])
    ax.set_ylim(-len(rows) + 0.4, 0.6)
    ax.minorticks_off()
    ax.grid(axis="y", visible=False)


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """Both traffic numbers, what PyTorch moves today, and the GFLOPs."""
    rows = {r.label.split(":")[0]: r for r in [*traffic_rows(frame), *flop_rows(frame)]}

    def number(value: float | None) -> float:
        return float("nan") if value is None else value

    def gb(value: float | None) -> str:
        return NOT_MEASURED if value is None else f"{value:.2f} GB"

    standard = rows["paper, mask and dropout"]
    plain = rows["PyTorch 2.11 eager, no mask"]
    masked = rows["PyTorch 2.11 eager, mask, dropout"]
    flash, today = (
        rows["FlashAttention, no first read-back"],
        rows["FlashAttention-2 in PyTorch 2.11"],
    )
    released = rows["FlashAttention as released"]
    six, seven = rows["standard"], rows["flash"]
    heads = number(seven.published) / number(seven.predicted) * SHAPE.batch * SHAPE.heads
    return [
        claim(
            "FA-1 Fig. 2 left, standard",
            predicted=f"{gb(standard.predicted)}: 18 N² + 12 Nd",
            measured=f"{gb(masked.measured)} like for like, {gb(plain.measured)} without mask and "
            "dropout (H200, PyTorch's eager kernels)",
            published=gb(standard.published),
            parts=[
                agreement("printed over 18 N² + 12 Nd", number(standard.published),
                          number(standard.predicted), 0.01, Evidence.PUBLISHED),
                agreement("counter with mask and dropout over printed", number(masked.measured),
                          number(standard.published), 0.05, Evidence.HARDWARE, limits=1.5,
                          why="PyTorch 2.11 runs more kernels"),
            ],
        ),
        claim(
            "FA-1 Fig. 2 left, flash",
            predicted=f"{gb(flash.predicted)}: 33 Nd, if the first pass reads nothing back, or if "
            f"fp32 temporaries cross one way; {gb(released.predicted)}: 45 Nd as released",
            measured=f"{gb(flash.measured)} and {gb(released.measured)}, both executed here; "
            f"{gb(today.measured)} by FlashAttention-2 (H200)",
            published=gb(flash.published),
            parts=[
                agreement("printed over 33 Nd", number(flash.published), number(flash.predicted),
                          0.015, Evidence.PUBLISHED),
                agreement("counted over the sum, 33 Nd", number(flash.measured),
                          number(flash.predicted), 1e-12, Evidence.COUNTED),
                agreement("counted over the sum, 45 Nd", number(released.measured),
                          number(released.predicted), 1e-12, Evidence.COUNTED),
            ],
        ),
        claim(
            "FA-1 Fig. 2 left, GFLOPs",
            predicted=f"{number(six.predicted):.1f} and {number(seven.predicted):.1f} GFLOP; 75.2 "
            f"would be {heads:.0f} heads in all",
            measured="-",
            published=f"{number(six.published):.1f} and {number(seven.published):.1f}",
            parts=[
                agreement(f"printed over {count} products of {SHAPE.batch * SHAPE.heads} heads",
                          number(row.published), number(row.predicted), 0.05, Evidence.PUBLISHED)
                for count, row in (("six", six), ("seven", seven))
            ],
        ),
        claim(
            "standard attention, passes",
            predicted=f"{gb(plain.predicted)} without mask and dropout, {gb(masked.predicted)} "
            "with both: 18 N² + 14 Nd, 25 N² + 14 Nd",
            measured=f"{gb(plain.measured)} and {gb(masked.measured)} (H200)",
            parts=[
                agreement(f"counter over passes, {name}", number(row.measured),
                          number(row.predicted), 0.02, Evidence.HARDWARE)
                for name, row in (("neither", plain), ("mask and dropout", masked))
            ],
        ),
    ]  # fmt: skip
