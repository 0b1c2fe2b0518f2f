"""All claims in one picture: a strip a source, a cell a claim, its verdict by colour and its
strongest evidence by mark."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from figures.verdict_table import ordered
from repro.claims import Claim, Evidence, Origin, Verdict

COLOURS = {
    Verdict.REPRODUCED: "#3FAF8B",
    Verdict.WITHIN_LIMITS: "#A9DCC8",
    Verdict.CONSISTENT: "#A6CEE8",
    Verdict.REFUTED: "#E8804A",
    Verdict.NOT_TESTED: "#E8E8E8",
}
#: Evidence -> marker, filled or not: what was run is filled.
MARKS = {
    Evidence.HARDWARE: ("o", True),
    Evidence.EXECUTED: ("P", True),
    Evidence.COUNTED: ("s", True),
    Evidence.OTHER: ("^", True),
    Evidence.PUBLISHED: ("o", False),
    Evidence.DERIVED: ("D", False),
}
WIDE = 7
INK = "#333333"


def draw(rows: Sequence[Claim]) -> Figure:
    """The picture of these claims, papers first."""
    groups = [(title, list(some)) for title, some in groupby(by_work(rows), key=work_of)]
    lines = sum(-(-len(some) // WIDE) for _, some in groups)
    figure, ax = plt.subplots(figsize=(13, 1.0 + 0.27 * (lines + 0.35 * len(groups))))
    y = 0.0
    for title, some in groups:
        ax.text(-0.06, y - 0.5, title, ha="right", va="center", fontsize=8, color=INK)
        for place, row in enumerate(some):
            x, at = place % WIDE, y - place // WIDE
            ax.add_patch(Rectangle((x, at - 0.95), 0.97, 0.9, color=COLOURS[row.verdict], lw=0))
            mark(figure, x + 0.045, at - 0.5, row)
            ax.text(x + 0.095, at - 0.5, short(row, title), va="center", fontsize=6.4, color=INK)
        y -= -(-len(some) // WIDE) + 0.35
    ax.set(xlim=(-1.9, WIDE), ylim=(y, 0.2))
    ax.axis("off")
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in COLOURS}
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=f"{verdict} ({counts[verdict]})") for verdict, colour in COLOURS.items()
    ]
    handles += [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=marker,
            color=INK,
            label=str(kind),
            markersize=5,
            markerfacecolor=INK if filled else "none",
        )
        for kind, (marker, filled) in MARKS.items()
    ]
    figure.legend(handles=handles, loc="lower center", ncols=5, fontsize=7.5)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.07)
    return figure


def mark(figure: Figure, x: float, y: float, row: Claim) -> None:
    """The strongest kind of evidence that a claim's numbers have, none where nothing is known."""
    kinds = {part.decides.evidence for part in row.parts if part.verdict is not Verdict.NOT_TESTED}
    for kind in MARKS:
        if kind in kinds:
            marker, filled = MARKS[kind]
            figure.axes[0].plot(x, y, marker=marker, markersize=4, color=INK, markerfacecolor=INK if filled else "none")
            return


def work_of(row: Claim) -> str:
    """The strip of a claim: a paper's short name, or whose the others are."""
    if row.origin is Origin.NOTE:
        return "study notes"
    return "this package" if row.origin is Origin.OURS else row.source.partition(" (")[0]


def by_work(rows: Sequence[Claim]) -> list[Claim]:
    """The claims with those of a source beside each other, sources in the order of first naming."""
    known = ordered(rows)
    order = list(dict.fromkeys(work_of(row) for row in known))
    return sorted(known, key=lambda row: order.index(work_of(row)))


def short(row: Claim, title: str) -> str:
    """A claim's name without what its strip says, as long as a cell is wide."""
    name = row.name
    for prefix in (
        title,
        "FA-1",
        "FA-2",
        "FA-3",
        "Korthikanti",
        "Chen",
        "ZeRO",
        "Flash-Decoding",
        "Rabe & Staats",
        "ring attention",
        "Milakov",
    ):
        name = name.removeprefix(prefix).lstrip(", ") or name
    return name if len(name) <= 27 else name[:26] + "…"
