"""Times of FlashAttention-2 and -4 on an H200, predicted from machine code, beside measured ones.

No GPU and no fitted number in the predictions, which were recorded before they were compared. No
clock was recorded with the times: a bar goes from the highest clock to the one under load.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.loop_model.card import H200_NOMINAL, H200_SUSTAINED
from figures.common import FILLED, Drawing, label_end, note, pick, powers_of_two
from repro import flash2_time, flash4_time, peers
from repro.peers import FLASH2, FLASH4, WIDENED, Comparison

EXPERIMENTS = peers.EXPERIMENTS
KINDS = {
    (FLASH2, "forward"): ("FA-2 forward", "#56B4E9"),
    (FLASH2, "backward"): ("FA-2 backward", "#0072B2"),
    (FLASH4, "forward"): ("FA-4 forward", "#E69F00"),
    (FLASH4, "backward"): ("FA-4 backward", "#D55E00"),
}
_FIELDS = ["implementation", "pass", "batch", "heads", "seqlen_q", "head_dim", "dtype",
           "causal"]  # fmt: skip
MARKERS = {64: "o", 128: "s"}
TICKS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def rows_of(frame: pandas.DataFrame) -> list[Comparison]:
    """The judged times that the frame has a value for."""
    measured = pick(frame, source="measured", implementation=list(peers.FOLDERS))
    there = measured.dropna(subset=["value"])[_FIELDS] if len(measured) else measured
    keys = {
        tuple(str(int(v)) if isinstance(v, float) else str(v) for v in row)
        for row in there.itertuples(index=False)
    }
    return [one for one in peers.judged(peers.comparisons()) if one.cell.fields in keys]


def draw(frame: pandas.DataFrame) -> Drawing:
    """The diagonal, and the ratio over the sequence length."""
    rows = rows_of(frame)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11.5, 5.2), layout="constrained", width_ratios=(1, 1.1)
    )
    _diagonal(left, rows)
    _ratios(right, rows)
    version, dsl = flash4_time.versions()
    note(
        figure,
        f"NVIDIA H200, bf16, and fp16 at 16 items of 8 heads. FlashAttention-2 of torch "
        f"{flash2_time.version(flash2_time.ON_H200)} and FlashAttention-4 {version} (compiled with "
        f"nvidia-cutlass-dsl {dsl}); times with CUDA events, without their clock.\nA bar ends at "
        f"the prediction for {H200_NOMINAL.hz / 1e9:.2f} GHz, the point is that for "
        f"{H200_SUSTAINED.hz / 1e9:.2f}. No parameter is fitted, none was decided on these times.",
    )
    return Drawing(figure, pandas.DataFrame([_row(one) for one in rows], columns=_COLUMNS))


_COLUMNS = ["peer", "pass", "head_dim", "causal", "dtype", "batch", "heads", "seqlen", "half",
            "measured_ms", "predicted_ms", "predicted_ms_at_highest_clock", "in_range"]  # fmt: skip


def _row(one: Comparison) -> tuple[object, ...]:
    shape = one.cell.shape
    return (
        one.cell.peer, one.cell.pass_, shape.head_dim, shape.causal, shape.dtype, shape.batch,
        shape.heads, shape.seqlen_q, "first" if one.first_half else "second",
        1e3 * one.measured_s, 1e3 * one.sustained_s, 1e3 * one.nominal_s, one.within,
    )  # fmt: skip


def _points(ax: Axes, one: Comparison, x: float, low: float, high: float) -> None:
    _, colour = KINDS[one.cell.peer, one.cell.pass_]
    ax.plot([x, x], [low, high], color=colour, linewidth=1, alpha=0.5)
    marker = MARKERS[one.cell.shape.head_dim]
    face = {"markerfacecolor": "white", "markeredgecolor": colour} if one.cell.shape.causal else {}
    ax.plot(x, high, marker=marker, color=colour, **{**FILLED, "markersize": 5, **face})


def _diagonal(ax: Axes, rows: list[Comparison]) -> None:
    ends = (0.08, 500.0)
    ax.plot(ends, ends, color="black", linewidth=1)
    for factor, side in ((1.15, "right"), (0.85, "left")):
        ax.plot(ends, [factor * x for x in ends], color="#999999", linewidth=0.8, linestyle=":")
        away = -7 if side == "right" else 7
        text = f"{100 * (factor - 1):+.0f} %"
        label_end(ax, 60, factor * 60, text, "#777777", xytext=(away, 0), ha=side)
    for one in rows:
        _points(ax, one, 1e3 * one.measured_s, 1e3 * one.nominal_s, 1e3 * one.sustained_s)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ticks = (0.1, 1, 10, 100)
    for axis in ("x", "y"):
        getattr(ax, f"set_{axis}ticks")(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set(xlabel="measured on an H200 (ms)", ylabel="predicted from machine code (ms)")
    ax.set_title(f"{len(rows)} times of one pass")
    handles = [Line2D([], [], marker="o", color=c, label=k, **FILLED) for k, c in KINDS.values()]
    handles += [
        Line2D([], [], marker=m, color="#555555", label=f"d = {d}", **FILLED)
        for d, m in MARKERS.items()
    ]
    hollow = {**FILLED, "markerfacecolor": "white", "markeredgecolor": "#555555"}
    handles.append(Line2D([], [], marker="o", label="causal", **hollow))
    ax.legend(handles=handles, loc="lower right")


def _ratios(ax: Axes, rows: list[Comparison]) -> None:
    shift = {key: 2 ** (0.16 * (n - 1.5)) for n, key in enumerate(KINDS)}
    ax.axhspan(1 - WIDENED, 1 + WIDENED, color="#EEEEEE", zorder=0)
    ax.axhline(1, color="black", linewidth=1)
    for one in rows:
        x = one.cell.shape.seqlen_q * shift[one.cell.peer, one.cell.pass_]
        _points(ax, one, x, one.nominal_s / one.measured_s, one.ratio)
    powers_of_two(ax, TICKS)
    ax.set(xlabel="sequence length N", ylabel="predicted over measured time", ylim=(0.4, 1.3))
    ax.set_title(f"above 1: predicted too slow. Grey: {100 * WIDENED:.0f} % around 1")
