"""FlashAttention 2022, Fig. 2 middle: memory accesses of the forward pass against Bc.

Lines: the exact sum over the tile loop, without the statistics l and m as the paper counts, and
with them. Points: bytes counted while the kernel ran on the host backend. Hollow: digitised from
the paper's figure. The runtime is published only; the accesses explain it up to Bc = 256.
"""

import matplotlib.pyplot as plt
import pandas

from figures.common import COLOURS, Drawing, key, label_end, note, pick, series, worst
from repro.claims import NOT_MEASURED, Claim, Evidence, agreement, claim
from repro.experiments._attention import STATISTICS

EXPERIMENTS = ("fig2-middle",)
GB = 1e9


def totals(frame: pandas.DataFrame, source: str) -> pandas.DataFrame:
    """GB per Bc, without and with statistics, at the SM boundary."""
    rows = pick(frame, source=source, metric="traffic_bytes")
    rows = rows.dropna(subset=["value"])
    plain = rows[~rows["tensor"].isin(STATISTICS)].groupby("block_n")["value"].sum() / GB
    every = rows.groupby("block_n")["value"].sum() / GB
    table = pd_concat({"without statistics": plain, "with statistics": every})
    return table.assign(source=source)


def pd_concat(parts: dict[str, pandas.Series]) -> pandas.DataFrame:
    """Named series as a long table with columns counted, block_n, value."""
    long = [s.rename("value").reset_index().assign(counted=name) for name, s in parts.items()]
    return pandas.concat(long, ignore_index=True)


def published(frame: pandas.DataFrame, metric: str, scale: float) -> pandas.DataFrame:
    """The paper's points."""
    rows = pick(frame, source="published", metric=metric)[["block_n", "value", "source"]].copy()
    return rows.assign(value=rows["value"] / scale)


def draw(frame: pandas.DataFrame) -> Drawing:
    """Accesses above, published runtime below, on a common axis of Bc."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(5.8, 5.4), sharex=True, height_ratios=(3, 1.6), layout="constrained"
    )
    predicted, measured = totals(frame, "predicted"), totals(frame, "measured")
    paper = published(frame, "hbm_bytes", GB)
    blue, light = COLOURS["flash1"], COLOURS["flash1-literal"]
    for counted, colour in (("with statistics", light), ("without statistics", blue)):
        line = series(top, pick(predicted, counted=counted), "block_n", "predicted", color=colour)
        series(top, pick(measured, counted=counted), "block_n", f"counted {counted}", color=colour)
        if not line.empty:
            first = line.iloc[0]
            offset = (6, 7) if counted == "with statistics" else (-6, -10)
            align = "left" if counted == "with statistics" else "right"
            label_end(
                top, first["block_n"], first["value"], f"{counted} l, m" if align == "left"
                else "q, k, v, out only\n(3Tc + 1)·N·d", colour, xytext=offset, ha=align,
            )  # fmt: skip
    series(top, paper, "block_n", "published", color=COLOURS["published"], markersize=11)
    top.set(xscale="log", yscale="log", ylabel="accesses, forward (GB)")
    top.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    top.set_ylim(0.7, 10)
    top.set_xlim(22, 640)
    top.set_title("Fewer, larger column blocks: accesses fall as 1/Bc")
    key(top, "counted on the host backend", loc="lower left")

    times = pick(frame, metric="time_ms")
    for bound, colour in (("accesses", blue), ("products", COLOURS["bound"])):
        line = pick(times, source="predicted", bound=bound)
        series(bottom, line, "block_n", f"time of {bound}", color=colour)
    runtime = pick(times, source="published")
    series(bottom, runtime, "block_n", "published runtime", color=COLOURS["published"])
    bottom.annotate("accesses at 1.555 TB/s", (64, 4.2), xytext=(-6, 0), ha="right", va="center",
                    textcoords="offset points", color=blue, fontsize=8)  # fmt: skip
    bottom.annotate("products at 312 TFLOP/s", (64, 0.9), xytext=(-6, 0), ha="right", va="center",
                    textcoords="offset points", color="#777777", fontsize=8)  # fmt: skip
    bottom.set(xlabel="column block Bc (keys)", ylabel="runtime (ms)", ylim=(0, 10))
    bottom.set_xticks([64, 128, 256, 512], ["64", "128", "256", "512"])
    bottom.minorticks_off()
    bottom.annotate("A100, published: past 256\nnot bound by accesses", (512, 3.2),
                    xytext=(0, 14), textcoords="offset points", ha="right", fontsize=8)  # fmt: skip
    note(figure, "FlashAttention 2022, Fig. 2 middle: N = 1024, d = 64, 16 heads, batch 64, fp16.")
    csv = pandas.concat([predicted, measured, paper.assign(counted="as printed")])
    csv = csv.assign(quantity="accesses", unit="GB")
    clock = times.assign(quantity="runtime", counted=times["bound"].fillna("as printed"))
    columns = ["quantity", "source", "counted", "block_n", "value", "unit"]
    return Drawing(figure, pandas.concat([csv[columns], clock[columns]]))


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """The four printed points, and the worst of them."""
    parts = {
        source: pick(totals(frame, source), counted="without statistics").set_index("block_n")
        for source in ("predicted", "measured")
    }
    paper = published(frame, "hbm_bytes", GB).set_index("block_n")["value"]
    predicted, measured = parts["predicted"]["value"], parts["measured"]["value"]
    return [
        claim(
            "FA-1 Fig. 2 middle",
            predicted=", ".join(f"{v:.2f}" for v in predicted) + " GB",
            measured=f"{', '.join(f'{v:.2f}' for v in measured)} GB (host backend, without l, m)"
            if len(measured) else NOT_MEASURED,
            published=", ".join(f"{v:.2f}" for v in paper) + " GB",
            parts=[
                agreement("printed over (3 Tc + 1) Nd, worst point", worst(paper / predicted), 1,
                          0.015, Evidence.PUBLISHED),
                agreement("counted over the sum, worst point",
                          worst(measured.reindex(predicted.index) / predicted), 1, 0.0,
                          Evidence.COUNTED),
            ],
        )
    ]  # fmt: skip
