"""Times of FlashAttention-2, -3 and -4 on Hopper, predicted from machine code, beside timed ones.

No GPU and no fitted number in the predictions. No clock was recorded with the measured times: a bar
goes from the highest clock to the one under load. Those published of FlashAttention-3 were taken at
a locked clock.
"""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.loop_model.card import H200_NOMINAL, H200_SUSTAINED
from figures.common import FILLED, HOLLOW, Drawing, label_end, note, pick, powers_of_two
from repro.timing import flash2_time, flash3_time, flash4_time, peers
from repro.timing.flash3_time import CLOCK
from repro.timing.peers import FLASH2, FLASH4, WIDENED, Comparison

EXPERIMENTS = ("throughput", "fig3-runtime", "throughput-peers")
FLASH3 = "flash-attention-3"
KINDS = {
    (FLASH2, "forward"): ("FA-2 forward", "#56B4E9"),
    (FLASH2, "backward"): ("FA-2 backward", "#0072B2"),
    (FLASH4, "forward"): ("FA-4 forward", "#E69F00"),
    (FLASH4, "backward"): ("FA-4 backward", "#D55E00"),
}
PUBLISHED = "#555555"
MARKERS = {(64, False): "o", (64, True): "^", (128, False): "s", (128, True): "D"}
TICKS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_FIELDS = ["implementation", "pass", "batch", "heads", "seqlen_q", "head_dim", "dtype", "causal"]
_COLUMNS = [
    "source",
    "peer",
    "pass",
    "head_dim",
    "causal",
    "dtype",
    "batch",
    "heads",
    "seqlen",
    "half",
    "timed_ms",
    "predicted_ms",
    "predicted_ms_at_highest_clock",
    "in_range",
]


def rows_of(frame: pandas.DataFrame) -> list[Comparison]:
    """The judged times that the frame has a value for."""
    measured = pick(frame, source="measured", implementation=list(peers.FOLDERS))
    there = measured.dropna(subset=["value"])[_FIELDS] if len(measured) else measured
    keys = {
        tuple(str(int(v)) if isinstance(v, float) else str(v) for v in row) for row in there.itertuples(index=False)
    }
    return [one for one in peers.judged(peers.comparisons()) if one.cell.fields in keys]


def draw(frame: pandas.DataFrame) -> Drawing:
    """The diagonal, and the ratio over the sequence length."""
    rows, published = rows_of(frame), flash3_time.points()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 5.2), layout="constrained", width_ratios=(1, 1.1))
    _diagonal(left, rows, published)
    _ratios(right, rows, published)
    torch = flash2_time.version(flash2_time.ON_H200)
    version, dsl = flash4_time.versions()
    note(
        figure,
        "Filled: measured on NVIDIA H200s, bf16, and fp16 at 16 items of 8 heads, clock not known; "
        f"a bar ends at the prediction for {H200_NOMINAL.hz / 1e9:.2f} GHz, the point is that for "
        f"{H200_SUSTAINED.hz / 1e9:.2f}.\nHollow: published with FlashGPU-Sim, fp16, an H100 at "
        f"{CLOCK.hz / 1e9:.1f} GHz, cold caches. Code: FA-2 of torch {torch}, FA-3 of fa3-fwd "
        f"{flash3_time.version()}, FA-4 {version} compiled\nwith nvidia-cutlass-dsl {dsl}. No "
        "parameter is fitted, none was decided on these times.",
    )
    table = [_row(one) for one in rows] + [_published_row(one) for one in published]
    return Drawing(figure, pandas.DataFrame(table, columns=_COLUMNS))


def _row(one: Comparison) -> tuple[object, ...]:
    shape = one.cell.shape
    return (
        "measured",
        one.cell.peer,
        one.cell.pass_,
        shape.head_dim,
        shape.causal,
        shape.dtype,
        shape.batch,
        shape.heads,
        shape.seqlen_q,
        "first" if one.first_half else "second",
        1e3 * one.measured_s,
        1e3 * one.sustained_s,
        1e3 * one.nominal_s,
        one.within,
    )


def _published_row(one: flash3_time.Point) -> tuple[object, ...]:
    shape = one.shape
    return (
        "published",
        FLASH3,
        "forward",
        shape.head_dim,
        shape.causal,
        shape.dtype,
        shape.batch,
        shape.heads,
        shape.seqlen_q,
        "",
        1e3 * one.published,
        1e3 * one.predicted,
        math.nan,
        "",
    )


def _measured(ax: Axes, one: Comparison, x: float, low: float, high: float) -> None:
    _, colour = KINDS[one.cell.peer, one.cell.pass_]
    ax.plot([x, x], [low, high], color=colour, linewidth=1, alpha=0.5)
    marker = MARKERS[one.cell.shape.head_dim, one.cell.shape.causal]
    ax.plot(x, high, marker=marker, color=colour, **{**FILLED, "markersize": 5})


def _published(ax: Axes, one: flash3_time.Point, x: float, y: float) -> None:
    marker = MARKERS[one.shape.head_dim, one.shape.causal]
    small = {"markersize": 5, "markeredgewidth": 0.9}
    ax.plot(x, y, marker=marker, color=PUBLISHED, **{**HOLLOW, **small})


def _diagonal(ax: Axes, rows: list[Comparison], published: list[flash3_time.Point]) -> None:
    ends = (0.04, 500.0)
    ax.plot(ends, ends, color="black", linewidth=1)
    for factor, side in ((1.15, "right"), (0.85, "left")):
        ax.plot(ends, [factor * x for x in ends], color="#999999", linewidth=0.8, linestyle=":")
        away = -7 if side == "right" else 7
        text = f"{100 * (factor - 1):+.0f} %"
        label_end(ax, 60, factor * 60, text, "#777777", xytext=(away, 0), ha=side)
    for one in rows:
        _measured(ax, one, 1e3 * one.measured_s, 1e3 * one.nominal_s, 1e3 * one.sustained_s)
    for point in published:
        _published(ax, point, 1e3 * point.published, 1e3 * point.predicted)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ticks = (0.1, 1, 10, 100)
    for axis in ("x", "y"):
        getattr(ax, f"set_{axis}ticks")(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set(xlabel="timed (ms)", ylabel="predicted from machine code (ms)")
    ax.set_title(f"{len(rows)} times measured and {len(published)} published, of one pass")
    handles = [Line2D([], [], marker="o", color=c, label=k, **FILLED) for k, c in KINDS.values()]
    handles.append(Line2D([], [], marker="o", color=PUBLISHED, label="FA-3 forward, published", **HOLLOW))
    handles += [
        Line2D([], [], marker=marker, color="black", label=_shape(*key), **FILLED) for key, marker in MARKERS.items()
    ]
    ax.legend(handles=handles, loc="lower right")


def _shape(head_dim: int, causal: bool) -> str:
    return f"d = {head_dim}{', causal' if causal else ''}"


def _ratios(ax: Axes, rows: list[Comparison], published: list[flash3_time.Point]) -> None:
    shift = {key: 2 ** (0.15 * (n - 2)) for n, key in enumerate((*KINDS, FLASH3))}
    ax.axhspan(1 - WIDENED, 1 + WIDENED, color="#EEEEEE", zorder=0)
    ax.axhline(1, color="black", linewidth=1)
    for one in rows:
        x = one.cell.shape.seqlen_q * shift[one.cell.peer, one.cell.pass_]
        _measured(ax, one, x, one.nominal_s / one.measured_s, one.ratio)
    for point in published:
        _published(ax, point, point.shape.seqlen_q * shift[FLASH3], point.ratio)
    powers_of_two(ax, TICKS)
    ax.set(xlabel="sequence length N", ylabel="predicted over timed", ylim=(0.4, 1.3))
    ax.set_title(f"above 1: predicted too slow. Grey: {100 * WIDENED:.0f} % around 1")
