"""FlashAttention 2022, Fig. 2 middle: memory accesses of the forward pass against Bc.

Hollow: digitised from the paper's figure. Lines: hypotheses about what was counted, exact sums over
the tile loop; points: the two of them that are executed, counted on the host backend. One list of
integers fits the printed points, (3 Tc + 1) N d, and two mechanisms have it: a first pass that
reads nothing back, and fp32 temporaries that cross memory one way only. The fit identifies neither.
The released code moves (5 Tc - 1) N d. The runtime is published only.
"""

import matplotlib.pyplot as plt
import pandas

from analysis.shapes import Tile
from analysis.traffic import predict_traffic
from figures.common import COLOURS, Drawing, key, label_ends, note, pick, series, worst
from repro.claims import NOT_MEASURED, Claim, Evidence, agreement, claim
from repro.experiments.papers.fig2_middle import COLUMN_BLOCKS, cells
from repro.experiments.shared.attention import STATISTICS, shape_of

EXPERIMENTS = ("fig2-middle",)
GB = 1e9


#: Hypothesis -> (algorithm, with row statistics, colour). "3 Tc + 1" stands for both mechanisms.
HYPOTHESES = {
    "3 Tc + 1": ("flash1-skip-first", False, COLOURS["flash1"]),
    "3 Tc + 1 and l, m": ("flash1-skip-first", True, COLOURS["flash1-skip-first"]),
    "3 Tc + 2, as printed": ("flash1-literal", False, COLOURS["flash1-literal"]),
    "5 Tc - 1, as released": ("flash1-released", False, "#CC79A7"),
}
FITTING = "3 Tc + 1"
#: How far the digitised points can be off (GB).
READING_GB = 0.03


def hypotheses() -> pandas.DataFrame:
    """GB per hypothesis and Bc; the initialisation of the printed algorithm is a kernel apart."""
    rows = []
    for name, (algorithm, statistics, _) in HYPOTHESES.items():
        for block_n in COLUMN_BLOCKS:
            traffic = predict_traffic(algorithm, shape_of(cells()[0]), Tile(16, block_n), "forward")
            main = traffic.kernels["flash1_forward"]
            total = sum(n for (tensor, _), n in main.items()
                        if statistics or tensor not in STATISTICS)  # fmt: skip
            rows.append({"hypothesis": name, "block_n": block_n, "value": total / GB,
                         "source": "predicted"})  # fmt: skip
    return pandas.DataFrame(rows)


def counted(frame: pandas.DataFrame) -> pandas.DataFrame:
    """GB per executed hypothesis and Bc, counted at the SM boundary."""
    rows = pick(frame, source="measured", metric="traffic_bytes").dropna(subset=["value"])
    parts = []
    for name, (algorithm, statistics, _) in HYPOTHESES.items():
        some = pick(rows, implementation=algorithm)
        some = some if statistics else some[~some["tensor"].isin(STATISTICS)]
        total = (some.groupby("block_n", as_index=False)["value"].sum()).assign(hypothesis=name)
        parts.append(total.assign(value=total["value"] / GB, source="measured"))
    return pandas.concat(parts, ignore_index=True)


def of(table: pandas.DataFrame, hypothesis: str) -> pandas.Series:
    """One hypothesis by Bc."""
    return pick(table, hypothesis=hypothesis).set_index("block_n")["value"]


def excluded(table: pandas.DataFrame, paper: pandas.Series) -> dict[str, float]:
    """Largest distance of a printed point from a hypothesis, in GB, where reading cannot explain
    it."""
    far = {name: float((of(table, name) - paper).abs().max()) for name in HYPOTHESES}
    return {name: gb for name, gb in far.items() if gb > READING_GB}


def published(frame: pandas.DataFrame, metric: str, scale: float) -> pandas.DataFrame:
    """The paper's points."""
    rows = pick(frame, source="published", metric=metric)[["block_n", "value", "source"]].copy()
    return rows.assign(value=rows["value"] / scale)


def draw(frame: pandas.DataFrame) -> Drawing:
    """Accesses above, published runtime below, on a common axis of Bc."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(5.8, 5.4), sharex=True, height_ratios=(3, 1.6), layout="constrained"
    )
    lines, points = hypotheses(), counted(frame)
    paper = published(frame, "hbm_bytes", GB)
    ends = []
    for name, (_, _, colour) in HYPOTHESES.items():
        line = series(top, pick(lines, hypothesis=name), "block_n", name, color=colour)
        series(top, pick(points, hypothesis=name), "block_n", f"counted {name}", color=colour)
        ends.append((512, float(line["value"].iloc[-1]), name, colour))
    series(top, paper, "block_n", "published", color=COLOURS["published"], markersize=11)
    top.set(xscale="log", yscale="log", ylabel="accesses, forward (GB)")
    top.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    top.set_ylim(0.7, 14)
    top.set_xlim(12, 2600)
    top.set_title("Accesses fall as 1/Bc; the released code would move more")
    label_ends(top, ends, gap=10)
    key(top, "counted on the host backend", loc="upper right")

    times = pick(frame, metric="time_ms")
    for bound, colour in (("accesses", COLOURS["flash1"]), ("products", COLOURS["bound"])):
        line = pick(times, source="predicted", bound=bound)
        series(bottom, line, "block_n", f"time of {bound}", color=colour)
    runtime = pick(times, source="published")
    series(bottom, runtime, "block_n", "published runtime", color=COLOURS["published"])
    bottom.annotate("accesses at 1.555 TB/s", (64, 4.2), xytext=(-6, 0), ha="right", va="center",
                    textcoords="offset points", color=COLOURS["flash1"], fontsize=8)  # fmt: skip
    bottom.annotate("products at 312 TFLOP/s", (64, 0.9), xytext=(-6, 0), ha="right", va="center",
                    textcoords="offset points", color="#777777", fontsize=8)  # fmt: skip
    bottom.set(xlabel="column block Bc (keys)", ylabel="runtime (ms)", ylim=(0, 10))
    bottom.set_xticks([64, 128, 256, 512], ["64", "128", "256", "512"])
    bottom.minorticks_off()
    bottom.annotate("A100, published: past 256\nnot bound by accesses", (512, 3.2),
                    xytext=(0, 24), textcoords="offset points", ha="right", fontsize=8)  # fmt: skip
    note(figure, "FlashAttention 2022, Fig. 2 middle: N = 1024, d = 64, 16 heads, batch 64, fp16. "
         "Lines in\nunits of N d elements; 3 Tc + 1 is also what fp32 temporaries crossing memory "
         "one way make.")  # fmt: skip
    csv = pandas.concat([lines, points, paper.assign(hypothesis="as printed")])
    csv = csv.assign(quantity="accesses", unit="GB")
    clock = times.assign(quantity="runtime", hypothesis=times["bound"].fillna("as printed"))
    columns = ["quantity", "source", "hypothesis", "block_n", "value", "unit"]
    return Drawing(figure, pandas.concat([csv[columns], clock[columns]]))


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """The four printed points beside all hypotheses; two of them executed."""
    lines, points = hypotheses(), counted(frame)
    paper = published(frame, "hbm_bytes", GB).set_index("block_n")["value"]
    predicted, executed = of(lines, FITTING), of(points, FITTING)
    out = ", ".join(f"{name} (by up to {gb:.2f} GB)" for name, gb in excluded(lines, paper).items())
    same = points.merge(lines, on=["hypothesis", "block_n"], suffixes=("", "_sum"))
    return [
        claim(
            "FA-1 Fig. 2 middle",
            predicted=f"{', '.join(f'{v:.2f}' for v in predicted)} GB: {FITTING} units of N d; "
            + (f"excluded at a reading error of {READING_GB} GB: {out}" if out else ""),
            measured=f"{', '.join(f'{v:.2f}' for v in executed)} GB (host backend, that form; the "
            f"released form {', '.join(f'{v:.2f}' for v in of(points, '5 Tc - 1, as released'))})"
            if len(executed) else NOT_MEASURED,
            published=", ".join(f"{v:.2f}" for v in paper) + " GB",
            parts=[
                agreement("printed over (3 Tc + 1) N d, worst point", worst(paper / predicted), 1,
                          0.015, Evidence.PUBLISHED),
                agreement("counted over the sums, worst point of all forms",
                          worst(same["value"] / same["value_sum"]), 1, 0.0, Evidence.COUNTED),
            ],
        )
    ]  # fmt: skip
