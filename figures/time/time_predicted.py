"""Time predicted from machine code against time measured, for 41 variants of a Hopper prototype."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.loop_model.card import H200_NOMINAL, H200_SUSTAINED
from figures.common import FILLED, Drawing, label_end, note, pick
from repro.timing import prototype
from repro.timing.time_validation import FIRST_CALL, Comparison, comparisons

EXPERIMENTS = ("prototype-time",)
KINDS = {"forward, d = 128": "#0072B2", "forward, d = 64": "#D55E00", "backward": "#009E73"}
#: What a step changes, from which variant to which, at which length and in which call.
STEPS = (
    ("rescale O never (wrong result)", "C3_persistent", "no_rescale", 16384, 3),
    ("lazy rescale, 176 keys a tile", "C3_persistent", "lazy_176", 16384, 3),
    ("lazy rescale, 192 keys a tile", "C3_persistent", "lazy_192", 16384, 3),
    ("no row maximum (wrong result)", "C3_persistent", "no_row_max", 16384, 3),
    ("no exp2 (wrong result)", "C3_persistent", "no_exp2", 16384, 3),
    ("optimistic softmax", "C3", "optimistic_128", 16384, 5),
    ("optimistic, causal, 2k", "cross_128_causal", "cross_optimistic_128_causal", 2048, 5),
    ("optimistic, d = 64, 2k", "cross_64", "cross_optimistic_64", 2048, 5),
    ("backward: mask in a branch", "backward_128_causal", "backward_128_causal_branch", 16384, 5),
    ("turns, d = 64, optimistic", "d64_optimistic_no_turns", "d64_optimistic", 16384, 5),
    ("turns, d = 128, optimistic", "optimistic_128_no_turns", "optimistic_128", 16384, 5),
    ("3 warpgroups, no overlap", "C3", "B3", 16384, 3),
    ("turns without overlap", "B", "C1", 16384, 1),
    ("overlap without turns", "B", "C2", 16384, 1),
)


def kind(variant: prototype.Variant) -> str:
    """Which colour a variant has."""
    return "backward" if variant.backward else f"forward, d = {variant.head_dim}"


def rows_of(frame: pandas.DataFrame) -> list[Comparison]:
    """The measured rows that have a value, beside their predictions."""
    measured = pick(frame, source="measured")
    there = measured[measured["value"].notna()]
    keys = {(r["implementation"], int(r["seqlen_q"]), int(r["call"])) for _, r in there.iterrows()}
    return [c for c in comparisons() if (c.variant, c.seqlen, c.call) in keys]


def draw(frame: pandas.DataFrame) -> Drawing:
    """The diagonal, and what each step gains."""
    rows = rows_of(frame)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 5.2), layout="constrained", width_ratios=(1, 1.05))
    _diagonal(left, rows)
    gains = _gains(right, rows)
    low = 100 * (H200_SUSTAINED.hz / H200_NOMINAL.hz - 1)
    note(
        figure,
        f"One NVIDIA H200, bf16, 16,384 tokens. Predicted at {H200_SUSTAINED.hz / 1e9:.2f} GHz, "
        "the clock under load at N = 16,384; none was recorded at 2,048. At the highest, "
        f"{H200_NOMINAL.hz / 1e9:.2f} GHz, all predictions\nchange by {low:.0f} %. Call 1 ran its "
        "variants one after another, at an unknown clock. No parameter is fitted to a time; "
        "between mechanisms the first half decided.",
    )
    table = [
        {
            "variant": r.variant,
            "seqlen": r.seqlen,
            "call": r.call,
            "half": "first" if r.first_half else "second",
            "measured_ms": 1e3 * r.measured_s,
            "predicted_ms": 1e3 * r.predicted_s,
            "predicted/measured": r.ratio,
        }
        for r in rows
    ]
    columns = ["variant", "seqlen", "call", "half", "measured_ms", "predicted_ms"]
    drawn = pandas.DataFrame(table, columns=[*columns, "predicted/measured"])
    return Drawing(figure, pandas.concat([drawn, pandas.DataFrame(gains)], ignore_index=True))


def _diagonal(ax: Axes, rows: list[Comparison]) -> None:
    ends = (0.18, 18.0)
    ax.plot(ends, ends, color="black", linewidth=1)
    for factor in (0.85, 1.15):
        ax.plot(ends, [factor * x for x in ends], color="#999999", linewidth=0.8, linestyle=":")
    for factor, side in ((1.15, "right"), (0.85, "left")):
        text = f"{100 * (factor - 1):+.0f} % "
        away = -7 if side == "right" else 7
        label_end(ax, 11, factor * 11, text, "#777777", xytext=(away, 0), ha=side)
    for row in rows:
        colour = KINDS[kind(prototype.variants()[row.variant])]
        if row.call == FIRST_CALL:
            ax.plot(1e3 * row.measured_s, 1e3 * row.predicted_s, marker="x", color=colour, markersize=5, alpha=0.6)
            continue
        marker = "s" if row.first_half else "o"
        ax.plot(
            1e3 * row.measured_s, 1e3 * row.predicted_s, marker=marker, color=colour, **{**FILLED, "markersize": 5.5}
        )
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ticks = (0.25, 0.5, 1, 2, 4, 8, 16)
    for axis in ("x", "y"):
        getattr(ax, f"set_{axis}ticks")(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set(xlabel="measured (ms)", ylabel="predicted (ms)")
    ax.set_title("all times, N = 2,048 and 16,384")
    handles = [Line2D([], [], marker="o", color=c, label=k, **FILLED) for k, c in KINDS.items()]
    shapes = (("s", "first half: decided on"), ("o", "second half: looked at once"))
    handles += [Line2D([], [], marker=m, color="#555555", label=n, **FILLED) for m, n in shapes]
    handles.append(Line2D([], [], marker="x", color="#555555", linestyle="none", label="call 1"))
    ax.legend(handles=handles, loc="lower right")


def _gains(ax: Axes, rows: list[Comparison]) -> list[dict[str, object]]:
    by_key = {(r.variant, r.seqlen, r.call): r for r in rows}
    table: list[dict[str, object]] = []
    for place, (name, before, after, seqlen, call) in enumerate(reversed(STEPS)):
        old, new = by_key.get((before, seqlen, call)), by_key.get((after, seqlen, call))
        predicted = measured = math.nan
        if old and new:
            predicted = 100 * (old.predicted_s / new.predicted_s - 1)
            measured = 100 * (old.measured_s / new.measured_s - 1)
            ax.plot([predicted, measured], [place, place], color="#CCCCCC", linewidth=1.5)
            ax.plot(predicted, place, marker="|", color="black", markersize=13, markeredgewidth=2)
            ax.plot(measured, place, marker="o", color="#0072B2", **FILLED)
        table.append(
            {"step": name, "seqlen": seqlen, "call": call, "predicted_gain_%": predicted, "measured_gain_%": measured}
        )
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_yticks(range(len(STEPS)), [name for name, *_ in reversed(STEPS)])
    ax.set(xlabel="faster than the variant before it (%)", ylim=(-0.7, len(STEPS) - 0.3))
    ax.set_title("what a step gains")
    bar = Line2D(
        [], [], marker="|", color="black", linestyle="none", markersize=11, markeredgewidth=2, label="predicted"
    )
    point = Line2D([], [], marker="o", color="#0072B2", label="measured (H200)", **FILLED)
    ax.legend(handles=[bar, point], loc="upper left")
    return table[::-1]
