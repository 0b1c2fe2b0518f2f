"""A GPU's memory level by level: size, bandwidth, and the intensity below which a level binds.

Levels as the study notes' table lists them, by datasheet, as published and as measured. What no
card has measured yet is named so. ``docs/memory-hierarchy.md`` has the numbers, written by
``make readme``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from tabulate import tabulate

from figures.common import COLOURS, FILLED, HOLLOW, Drawing, key, note, pick, say
from repro.claims.machine.hierarchy import GIB, NOT_MEASURED, NOTES, OURS, judge, measured, named, of_card
from repro.experiments.bytes.memory_hierarchy import CARDS, LATENCY, LEVELS, MEASURED, RATES

EXPERIMENTS = ("memory-hierarchy", "gpu-ceilings", "ceiling")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory-hierarchy.md"
PUBLISHED = {"NVIDIA H100 SXM5": "H100", "NVIDIA A100": "A100"}
SHADES = {"A100-SXM4-40GB": "#CC79A7", "H100-SXM5-80GB": "#0072B2", "H200": "#009E73"}


def value(frame: pandas.DataFrame, **wanted: object) -> float:
    """The one value that matches, NaN where there is none."""
    found = pick(frame, **wanted)["value"].dropna()
    return float(found.iloc[-1]) if len(found) else math.nan


def sheet(frame: pandas.DataFrame, card: str, level: str, metric: str) -> float:
    """What datasheet, units and clocks give."""
    wanted = {"experiment": "memory-hierarchy", "source": "predicted", "metric": metric}
    return value(frame, device=card, implementation=level, **wanted)


def latency(frame: pandas.DataFrame, card: str, level: str) -> float:
    """Nanoseconds of a dependent load, NaN where none was measured."""
    if level not in LATENCY:
        return math.nan
    experiment, probe = LATENCY[level]
    rows = pick(frame, experiment=experiment, implementation=probe, source="measured")
    return value(of_card(rows, card))


def cards(frame: pandas.DataFrame) -> list[str]:
    """The card of our records first, then any other that has measured something."""
    rows = frame[(frame["source"] == "measured") & frame["value"].notna()]
    found = {named(device) for device in rows["device"].dropna()} - {"", OURS}
    return [OURS, *sorted(found & {gpu.name for gpu in CARDS})]


def levels(frame: pandas.DataFrame) -> pandas.DataFrame:
    """One row per card and level or rate; NaN where nothing is known."""
    rows = []
    for card in cards(frame):
        peak, _ = measured(frame, card, "tensor cores")
        for level in (*LEVELS, *RATES):
            metric = "throughput" if level in RATES else "bandwidth"
            reached, tool = measured(frame, card, level)
            rows.append(
                {
                    "card": card,
                    "level": level,
                    "size_bytes": sheet(frame, card, level, "size_bytes"),
                    "datasheet": sheet(frame, card, level, metric),
                    "measured": reached,
                    "latency_ns": latency(frame, card, level),
                    "tool": tool,
                    "ridge": sheet(frame, card, level, "ridge"),
                    "measured_ridge": peak / reached if level in LEVELS else math.nan,
                }
            )
    return pandas.DataFrame(rows)


def draw(frame: pandas.DataFrame) -> Drawing:
    """Bandwidth against size on the left, ridges on the right."""
    table = levels(frame)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.4), layout="constrained")
    pyramid(left, frame, table)
    ridges(right, table[table["card"] == OURS])
    note(
        figure,
        "Lines: datasheets, units and clocks. Shared memory is that of all SMs together. "
        f"Measured on: {', '.join(cards(frame)) if table['measured'].notna().any() else 'no card'}"
        ". Right: rate of the tensor cores over bandwidth, both from the same source.",
    )
    return Drawing(figure, table)


def pyramid(ax: Axes, frame: pandas.DataFrame, table: pandas.DataFrame) -> None:
    """A line a card through shared memory, L2 and HBM; points where something is measured."""
    for card, colour in SHADES.items():
        known = [
            (sheet(frame, card, level, "size_bytes"), sheet(frame, card, level, "bandwidth"))
            for level in ("shared memory", "L2", "HBM")
        ]
        ax.plot(*zip(*known, strict=True), color=colour, label=card.split("-")[0])
        reached = table[(table["card"] == card) & table["level"].isin(["shared memory", "L2", "HBM"])]
        ax.plot(reached["size_bytes"], reached["measured"], marker="o", color=colour, **FILLED)
    for device, group in pick(frame, source="published", experiment="memory-hierarchy").groupby("device"):
        wide = group.pivot_table(index="implementation", columns="metric", values="value")
        if {"size_bytes", "bandwidth"} <= set(wide.columns):
            ax.plot(
                wide["size_bytes"],
                wide["bandwidth"],
                marker="o",
                color=next(c for n, c in SHADES.items() if n.startswith(PUBLISHED[str(device)])),
                **HOLLOW,
            )
    (low, high), rates = NOTES["HBM"]
    assert rates is not None
    slow, fast = rates
    ax.add_patch(Rectangle((low, slow), high - low, fast - slow, color="#999999", alpha=0.3, lw=0))
    say(ax, "the notes' HBM", (low, slow), (-4, -4), ha="right", va="center", color="#777777")
    ax.set(
        xscale="log", yscale="log", xlabel="size (bytes)", ylabel="bandwidth (TB/s)", xlim=(7e6, 1e12), ylim=(0.5, 70)
    )
    ax.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    ax.minorticks_off()
    for text, x, y in (("shared memory", 1.4e7, 44), ("L2", 7e7, 14), ("HBM", 1.7e11, 5.2)):
        ax.text(x, y, text, fontsize=8, color="#555555")
    ax.set_title("Larger is slower")
    ax.add_artist(ax.legend(loc="lower left", title="datasheet"))
    key(ax, OURS, loc="upper right")


def ridges(ax: Axes, table: pandas.DataFrame) -> None:
    """Bars: FLOPs per byte below which a level binds; dots where both rates were measured."""
    names = [level for level in LEVELS if level != "registers"]
    for place, level in enumerate(names):
        row = table[table["level"] == level].iloc[0]
        ax.barh(-place, row["ridge"], height=0.55, color=COLOURS["bound"])
        ax.text(row["ridge"] * 1.12, -place + 0.13, f"{row['ridge']:,.0f} datasheet", va="center", fontsize=8)
        if math.isfinite(row["measured_ridge"]):
            ax.plot(row["measured_ridge"], -place, "o", color=SHADES[OURS], **FILLED)
            told, ink = f"{row['measured_ridge']:,.0f} measured", SHADES[OURS]
        else:
            told, ink = NOT_MEASURED, "#999999"
        ax.text(row["ridge"] * 1.12, -place - 0.16, told, va="center", fontsize=8, color=ink)
    ax.set_yticks([-i for i in range(len(names))], names)
    ax.set(xscale="log", xlim=(10, 3e5), xlabel=f"{OURS}: FLOP per byte of the level")
    ax.set_title("Below this many FLOPs a byte, the level binds")
    ax.grid(axis="y", visible=False)


def number(amount: float, form: str = ",.3g") -> str:
    """A number, or what its absence means."""
    return format(amount, form) if math.isfinite(amount) else "-"


def size(nbytes: float) -> str:
    """Bytes in the unit that the level is known by."""
    if not math.isfinite(nbytes):
        return "-"
    return f"{nbytes / GIB:.0f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"


def page(frame: pandas.DataFrame) -> str:
    """``docs/memory-hierarchy.md``: levels of each measured card, and the notes' table judged."""
    parts = [
        "# The memory hierarchy, level by level\n\n"
        "Written by `make readme` from the committed records. Predicted: datasheets, units and "
        "clocks (`analysis/gpus.toml` has the origin of each). Measured: probes of "
        "`kernels/beside/probes.cu` (`make measure EXPERIMENT=gpu-ceilings` on a GPU), before them "
        "PyTorch's copy and matrix product. The ridge is the tensor cores' rate over the level's "
        "bandwidth: a kernel with fewer FLOPs per byte of that level is bound by it. "
        "Registers and shared memory are those of all SMs together.\n"
    ]
    table = levels(frame)
    for card, rows in table.groupby("card", sort=False):
        lines = []
        for row in rows.itertuples():
            unit = {"tensor cores": "TFLOP/s", "exponentials": "T/s"}.get(row.level, "TB/s")
            probed, timed = row.level in MEASURED, row.level in LATENCY
            lines.append(
                (
                    row.level,
                    size(row.size_bytes),
                    f"{row.datasheet:,.3g} {unit}" if math.isfinite(row.datasheet) else "-",
                    f"{row.measured:,.3g} {unit}"
                    if math.isfinite(row.measured)
                    else (NOT_MEASURED if probed else "no probe"),
                    published(frame, row.level, unit),
                    number(row.ridge, ",.0f"),
                    number(row.measured_ridge, ",.0f") if row.level in LEVELS else "-",
                    f"{row.latency_ns:.0f} ns"
                    if math.isfinite(row.latency_ns)
                    else (NOT_MEASURED if timed else "no probe" if row.level in LEVELS else "-"),
                    row.tool or "-",
                )
            )
        headers = (
            "level",
            "size",
            "predicted",
            "measured",
            "published (other cards)",
            "ridge, predicted (FLOP/B)",
            "ridge, measured (FLOP/B)",
            "latency",
            "measured by",
        )
        parts.append(f"## {card}\n\n{_table(lines, headers)}\n")
    judged = list(judge())
    names = ("level", "the notes say", *(gpu.name for gpu in CARDS))
    parts.append(
        "## The study notes' table\n\n"
        'Note 002, 1.1. "~" is taken as 10 %. Latencies (1, ~10 and ~500 cycles) are open until a '
        "card has measured them; the notes' CPU levels are not probed here. A register file has "
        'a bandwidth too; "unlimited" only says that it is no bottleneck.\n\n'
        f"{_table(judged, names)}\n"
    )
    return "\n".join(parts)


def _table(rows: Sequence[tuple[str, ...]], headers: tuple[str, ...]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def published(frame: pandas.DataFrame, level: str, unit: str) -> str:
    """What the papers print for this level, with the card."""
    rows = pick(frame, source="published", implementation=level, metric=["bandwidth", "throughput"])
    return "; ".join(f"{row.value:,.3g} {unit} ({PUBLISHED[row.device]})" for row in rows.itertuples()) or "-"
