"""What all figures share: the registry, the look, and files that are the same on every run.

A figure is a module of this package, ``figures/NAME.py``, with ::

    EXPERIMENTS = ("fig2-middle",)          # whose records it shows; Make reads this line too

    def draw(frame: pandas.DataFrame) -> Drawing: ...

``frame`` is the tidy frame of those experiments (``repro.experiments.tidy``): predicted, measured
and published rows with the same columns. Predicted values are drawn as lines, measured ones as
filled points, published ones as hollow points: :func:`curve` does it for a selection, and
:func:`finish` sets the axes and places the labels. ``python -m figures draw NAME`` writes NAME.png,
NAME.svg and NAME.csv to figures/out/.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib

matplotlib.use("Agg")  # works without a display, and draws the same everywhere

import matplotlib.pyplot as plt
import pandas
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import files
from figures import _paper
from repro.claims.values import pick as pick
from repro.claims.values import worst as worst
from repro.measuring import machine
from repro.measuring.images import HASH_SALT, UNSAID, settle
from repro.measuring.modules import in_folders

log = logging.getLogger("figures")

#: Looks beside the usual one, for screens.
STYLES = ("paper",)
#: ``STYLE=paper`` draws for a paper's widths, into a folder of its own below the usual one.
STYLE = os.environ.get("STYLE", "")
#: Where figures are written; ``REPRO_FIGURES`` names another folder.
OUT = Path(os.environ.get("REPRO_FIGURES") or machine.HOME / "figures" / "out") / STYLE

#: One colour per algorithm, in every figure (Okabe-Ito: distinct for colour-blind readers).
COLOURS = {
    "standard": "#D55E00",
    "flash1": "#0072B2",
    "flash1-released": "#0072B2",
    "flash1-skip-first": "#8AA9C9",
    "flash1-literal": "#56B4E9",
    "flash": "#009E73",
    "flash-deterministic": "#CC79A7",
    "published": "#555555",
    "bound": "#999999",
}
FILLED: dict[str, Any] = {"linestyle": "none", "markeredgecolor": "white", "markeredgewidth": 0.6, "markersize": 6}
HOLLOW: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "none", "markeredgewidth": 1.3, "markersize": 7}


@dataclass(frozen=True)
class Drawing:
    """A figure and the numbers in it (the CSV's rows, in the order drawn)."""

    figure: Figure
    table: pandas.DataFrame


def style() -> None:
    """The common look; also what makes the files reproducible byte for byte.

    It starts from matplotlib's own defaults: what a user's matplotlibrc says stays out.
    """
    matplotlib.rcdefaults()
    seaborn.set_theme(
        context="paper",
        style="ticks",
        palette="colorblind",
        rc={
            "figure.dpi": 100,
            "savefig.dpi": 160,
            "font.family": "DejaVu Sans",  # ships with matplotlib, so text has one width everywhere
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#E6E6E6",
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "svg.fonttype": "none",
            "svg.hashsalt": HASH_SALT,
            "pdf.fonttype": 42,  # TrueType, embedded: publishers refuse matplotlib's Type 3
        },
    )


@cache
def _modules() -> dict[str, str]:
    """Name of a figure -> its module."""
    return in_folders("figures", __file__, without=("report",))


def names() -> tuple[str, ...]:
    """All figures, by module name."""
    return tuple(sorted(_modules()))


def require(name: str) -> None:
    """ValueError lists the known figures."""
    if name not in names():
        raise ValueError(f"no figure {name!r}; known: {', '.join(names())}")


def module(name: str) -> ModuleType:
    """The module of a figure; ValueError lists the known ones."""
    require(name)
    return importlib.import_module(_modules()[name])


def formats() -> tuple[str, ...]:
    """The image files of a figure: PNG, SVG, and what ``FORMATS`` names beside them (pdf).

    ValueError names a format that is not known.
    """
    chosen = os.environ.get("FORMATS", "").replace(",", " ").split()
    for name in chosen:
        if name not in UNSAID:
            raise ValueError(f"FORMATS={name!r} is not one of {', '.join(UNSAID)}")
    return tuple(dict.fromkeys(("png", "svg", *chosen)))


def require_style(style: str) -> None:
    """ValueError names a ``STYLE`` that is not known."""
    if style not in ("", *STYLES):
        raise ValueError(f"STYLE={style!r} is not {', '.join(STYLES)} (or nothing, for screens)")


def save(
    name: str, drawing: Drawing, out: Path = OUT, images: Sequence[str] | None = None, style: str = STYLE
) -> list[Path]:
    """Write NAME.csv and the ``images`` (default: :func:`formats`), without dates or random ids.

    Nothing is written before everything has been drawn. OSError (disk full, ...) names the file
    that could not be written.
    """
    require_style(style)
    if style:
        _paper.fit(name, drawing.figure)
    settle(drawing.figure)
    rows = drawing.table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    contents = {"csv": rows.encode()}
    for ending in formats() if images is None else images:
        if style:
            contents[ending] = _paper.WRITERS[ending](drawing.figure, UNSAID[ending])
            continue
        image = io.BytesIO()
        drawing.figure.savefig(image, format=ending, metadata=UNSAID[ending])
        contents[ending] = image.getvalue()
    plt.close(drawing.figure)
    paths = []
    for ending, content in contents.items():
        paths.append(out / f"{name}.{ending}")
        files.write_whole(paths[-1], content)
    return paths


def write_text(path: Path, text: str) -> None:
    """Write a text file as a whole, or leave the old one."""
    files.write_whole(path, text.encode())


def shown(path: Path) -> str:
    """A path as it is printed: from the current folder, where it lies below that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def series(
    ax: Axes, rows: pandas.DataFrame, x: str, what: str, *, y: str = "value", label: str | None = None, **style: Any
) -> pandas.DataFrame:
    """Draw y against x in the manner of the rows' source; returns what was drawn.

    Rows without a value (out of memory, failed) are left out and named in the log, and so is a
    series with nothing to draw: a gap is never silent and never an error.
    """
    usable = rows[rows[y].notna() & rows[x].notna()].sort_values(x)
    for _, gap in rows[rows[y].isna()].iterrows():
        log.warning("%s: no point at %s = %s (%s)", what, x, gap[x], gap.get("error") or "no value")
    if usable.empty:
        log.warning("%s: nothing to draw", what)
        return usable
    kinds = set(usable["source"])
    if kinds == {"predicted"}:
        style = {"linewidth": 1.5, **style}
    elif kinds == {"measured"}:
        style = {**FILLED, "marker": "o", **style}
    elif kinds == {"published"}:
        style = {**HOLLOW, "marker": "o", **style}
    else:
        raise ValueError(f"{what}: one series mixes sources {sorted(kinds)}")
    ax.plot(usable[x], usable[y], label=label, **style)
    return usable


def label_end(ax: Axes, x: float, y: float, text: str, colour: str, **options: Any) -> None:
    """Write a label right of a curve's last point, in the curve's colour."""
    place: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
    # Grid lines stay behind it, and it stays text in the SVG, which an outline would not.
    place["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.3}
    ax.annotate(text, (x, y), color=colour, **{**place, **options})


def label_ends(ax: Axes, ends: Sequence[tuple[float, float, str, str]], *, gap: float = 11.0) -> None:
    """Label curves at their last points (x, y, text, colour), at least ``gap`` points apart.

    Call it when limits and scales are final: labels that would overlap are moved up and down.
    """
    # Heights in points within the axes. The layout is not settled yet; its few percent do not
    # matter, and drawing everything once just to know them would double the time of a figure.
    tall = ax.get_window_extent().height * 72 / ax.figure.dpi
    fraction = ax.transScale + ax.transLimits
    heights = [fraction.transform((x, y))[1] * tall for x, y, _, _ in ends]
    order = sorted(range(len(ends)), key=lambda i: heights[i])
    places = [heights[i] for i in order]
    for _ in range(200):  # push neighbours apart evenly until they all fit
        moved = False
        for low in range(len(places) - 1):
            lack = gap - (places[low + 1] - places[low])
            if lack > 0.01:
                places[low] -= lack / 2
                places[low + 1] += lack / 2
                moved = True
        if not moved:
            break
    for place, i in zip(places, order, strict=True):
        x, y, text, colour = ends[i]
        label_end(ax, x, y, text, colour, xytext=(5, place - heights[i]))


#: Where a label belongs: x, y, text, colour.
End = tuple[float, float, str, str]


def curve(
    ax: Axes,
    rows: pandas.DataFrame,
    x: str,
    label: str,
    colour: str,
    *,
    y: str = "value",
    sources: Sequence[str] = ("predicted", "measured"),
    line: Mapping[str, Any] | None = None,
    points: Mapping[str, Any] | None = None,
) -> list[End]:
    """Draw a selection in one colour: a line as predicted, filled points as measured, hollow ones as
    published. Returns where its label belongs: at the end of the line, or of the points.

    sources: what is expected, of which nothing may be missing silently.
    line, points: the looks of what is predicted, and of the rest.
    """
    last: list[pandas.Series] = []
    for source in sources:
        looks = (line if source == "predicted" else points) or {}
        drawn = series(ax, pick(rows, source=source), x, f"{source} {label}", y=y, color=colour, **looks)
        last = last or [row for _, row in drawn.tail(1).iterrows()]
    return [(float(row[x]), float(row[y]), label, colour) for row in last]


def say(
    ax: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], *, fontsize: float = 8, **options: Any
) -> None:
    """Write a few words beside a point, ``offset`` in points from it."""
    ax.annotate(text, at, xytext=offset, textcoords="offset points", fontsize=fontsize, **options)


def log_axis(ax: Axes, axis: str, ticks: Sequence[float], texts: Sequence[str] | None = None, base: float = 10) -> None:
    """A log axis with these ticks alone, written as they are or as ``texts``."""
    getattr(ax, f"set_{axis}scale")("log", base=base)
    getattr(ax, f"set_{axis}ticks")(list(ticks), [f"{t:g}" for t in ticks] if texts is None else texts)
    getattr(ax, f"{axis}axis").minorticks_off()


def powers_of_two(ax: Axes, ticks: Sequence[float], axis: str = "x") -> None:
    """A base-two log axis with ticks written as 512, 1k, 2k, ..."""
    log_axis(ax, axis, ticks, [f"{t / 1024:g}k" if t >= 1024 else f"{t:g}" for t in ticks], base=2)
    ax.minorticks_off()


def finish(
    ax: Axes,
    title: str = "",
    *,
    x: Sequence[float] = (),
    log: bool = False,
    ends: Sequence[End] = (),
    gap: float = 11.0,
    **properties: Any,
) -> None:
    """What a panel has when everything is drawn: title, axes, labels at the ends of its curves.

    x: ticks of a base-two axis; log: y on a log axis; properties: of ``Axes.set`` (xlabel, ylim, ...).
    """
    if log:
        ax.set_yscale("log")
    if x:
        powers_of_two(ax, x)
    ax.set(**properties)
    if title:
        ax.set_title(title)
    label_ends(ax, ends, gap=gap)


def key(ax: Axes, measured: str | None, *, published: bool = True, **options: Any) -> None:
    """A legend that says what a line, a point and a hollow point are."""
    handles = [Line2D([], [], color="black", label="predicted")]
    if measured:
        filled = {**FILLED, "marker": "o", "color": "black"}
        handles.append(Line2D([], [], **filled, label=f"measured ({measured})"))
    if published:
        hollow = {**HOLLOW, "marker": "o", "color": COLOURS["published"]}
        handles.append(Line2D([], [], **hollow, label="published"))
    ax.add_artist(ax.legend(handles=handles, handlelength=1.6, **options))


def note(figure: Figure, text: str) -> None:
    """Small print under the figure: shape, machine, origin."""
    figure.supxlabel(text, fontsize=7.5, color="#555555", x=0.01, ha="left")


def devices(rows: pandas.DataFrame) -> str:
    """The machines behind measured rows, for the small print."""
    found = sorted(set(rows.loc[rows["source"] == "measured", "device"].dropna()))
    return ", ".join(found) or "no machine yet"
