"""The optimistic softmax over score drift: tiles repaired, error, and work beside the exact kernel.

Scores grow by the drift in the order the keys are walked, the worst case for a row maximum that is
looked for in the first key tile only (``analysis/optimistic.py``). Where tiles are not repaired the
error is somewhat larger: the exact kernel's largest weight is 1, which bf16 holds without rounding.
"""

import matplotlib.pyplot as plt
import pandas

from analysis.optimistic import LIMIT_LOG2, onset
from figures.common import FILLED, HOLLOW, Drawing, devices, note, pick, say, series
from repro.claims.options.optimistic import relative
from repro.experiments.bytes.optimistic import EXACT, NATS, OPTIMISTIC, SEQLEN_K, SHAPE, cells, first_key_looked_at

EXPERIMENTS = ("optimistic", "gpu-optimistic")
COLOUR = {EXACT: "#0072B2", OPTIMISTIC: "#D55E00"}
TIME = "#CC79A7"


def draw(frame: pandas.DataFrame) -> Drawing:
    """Share of tiles repaired; error; bytes and time relative to the exact kernel."""
    ours = pick(frame, experiment="optimistic")
    upward = pick(ours, pattern="upward")
    start = onset("upward", SEQLEN_K, first_key_looked_at(cells()[0]))
    figure, (share, error, work) = plt.subplots(1, 3, figsize=(12, 4.0), layout="constrained")

    share.plot([0, start, start, NATS[-1]], [0, 0, 100, 100], color="black", linewidth=1.5)
    flagged = pick(upward, metric="flagged_share", implementation=OPTIMISTIC).copy()
    flagged["percent"] = 100 * flagged["value"]
    series(
        share, pick(flagged, source="measured"), "nats", "counted share of tiles", y="percent", color=COLOUR[OPTIMISTIC]
    )
    say(
        share, f"predicted: sums pass 2$^{{{LIMIT_LOG2}}}$\nfrom {start:.1f} nats on", (start, 50), (14, 0), va="center"
    )
    share.set(ylabel="query tiles computed again (%)", ylim=(-5, 105))
    share.set_title("what is repaired")

    errors = pick(upward, metric="rmse", tensor="out", source="measured")
    for name, text, marker in ((EXACT, "exact", HOLLOW), (OPTIMISTIC, "optimistic", FILLED)):
        rows = pick(errors, implementation=name).sort_values("nats")
        error.plot(rows["nats"], rows["value"], label=text, color=COLOUR[name], **{**marker, "marker": "o"})
    error.set_yscale("log")
    error.set(ylabel="error of out against float64 (RMS)")
    error.legend(loc="upper left")
    error.set_title("what it costs in accuracy")

    moved, times = relative(ours, "traffic_bytes"), relative(frame, "time_ms")
    line = pick(moved, source="predicted").sort_values("nats")
    low, high = line["ratio"].iloc[0], line["ratio"].iloc[-1]
    work.plot(
        [0, start, start, NATS[-1]], [low, low, high, high], color="black", linewidth=1.5, label="bytes, predicted"
    )
    points = pick(moved, source="measured")
    work.plot(
        points["nats"], points["ratio"], color=COLOUR[OPTIMISTIC], **{**FILLED, "marker": "o"}, label="bytes, counted"
    )
    for number, (shape, rows) in enumerate(times.groupby(["seqlen_k", "head_dim"])):
        style = {**FILLED, "marker": "sD^v"[number % 4], "color": TIME}
        work.plot(rows["nats"], rows["ratio"], label=f"time, N = {shape[0]}, d = {shape[1]}", **style)
    if times.empty:
        work.text(0.97, 0.06, "time: not measured", color="#777777", fontsize=8, ha="right", transform=work.transAxes)
    work.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
    work.set(ylabel="relative to the exact kernel")
    work.legend(loc="center right")
    work.set_title("what it costs in work")
    error.set_yticks([1e-4, 2e-4, 4e-4, 8e-4], ["0.0001", "0.0002", "0.0004", "0.0008"])
    for ax in (share, error, work):
        ax.set_xscale("symlog", base=2, linthresh=16)
        ax.set_xticks([0, 10, 20, 30, 60, 120, 200], ["0", "10", "20", "30", "60", "120", "200"])
        ax.minorticks_off()
        ax.set(xlabel="drift of the scores (nats)", xlim=(-2, 260))
    where = "" if times.empty else f" Time: {devices(pick(frame, metric='time_ms'))}."
    note(
        figure,
        f"Upward drift plus N(0, 1); {SHAPE.seqlen_q} queries, {SEQLEN_K} keys, d = {SHAPE.head_dim}, bf16. "
        "Counted and judged on the host backend. The prediction has no noise: the largest of 128 "
        f"noisy keys is the reference,\nwhich moves the onset up by a nat or two.{where}",
    )
    kept = ["source", "implementation", "nats", "metric", "value", "unit"]
    table = pandas.concat([flagged[kept], errors[kept], pick(upward, metric="traffic_bytes")[kept]])
    more = times.rename(columns={"ratio": "value"}).assign(metric="time over exact", unit="1")
    return Drawing(figure, pandas.concat([table, more], ignore_index=True) if len(more) else table)
