"""``STYLE=paper``: a figure refitted to the width of a paper's column or text, in printed size.

A figure is drawn as always and scaled as a whole by :data:`SCALE` when it is written, so that
lines, points and labels keep their proportions. What is too wide for that is folded: panels side by
side go into further rows, titles, labels and small print into further lines, and names below an
axis that would overlap are set upright. No text is printed smaller than :data:`SMALLEST`, but for
exponents and indices, as in any paper.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from typing import Any

import matplotlib.backends.backend_pdf as pdf
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_mixed import MixedModeRenderer
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.text import Text

#: Inches on paper: one column of two, the text, a page turned on its side, and the tallest figure.
COLUMN, TEXT, SIDEWAYS, TALLEST = 3.35, 6.75, 9.0, 8.6
#: Figures too wide for the text, for a page turned on its side -> why.
TURNED = {
    "fa1_fig2_left": "each row has a formula left and its numbers right of the panel",
    "l2_registered": "thirty named rows beside two panels: folded, they would be printed too close",
    "accuracy": "a grid whose columns have their titles above the first row",
}
#: Printed over drawn size.
SCALE = 0.75
#: Printed size of text, in points.
SMALLEST = 6.0
#: Dots an inch of the printed PNG.
DPI = 300
#: A figure drawn at most this wide, in inches, goes into one column.
NARROW = 5.0
#: Panels may become narrower by this factor before they go into a further row.
SQUEEZE = 0.91
#: What small print calls panels side by side -> when they are folded.
PLACES = {
    "Left:": "First panel:",
    "Middle:": "Second panel:",
    "Right:": "Last panel:",
    "the middle panel": "the second panel",
}
#: Inches that a further line of text takes.
LINE = 0.16


def fit(name: str, figure: Figure) -> None:
    """Fold the figure and give it its size; the layout is not settled yet."""
    width, height = figure.get_size_inches()
    figure.dpi = DPI * SCALE  # letters are hinted to whole pixels: measured as they are printed
    printed = SIDEWAYS if name in TURNED else COLUMN if width <= NARROW else TEXT
    drawn = printed / SCALE
    tallest = (TEXT if name in TURNED else TALLEST) / SCALE
    rows = 1.0 if name in TURNED else _fold(figure, drawn)
    for text in figure.findobj(Text):
        text.set_fontsize(max(text.get_fontsize(), SMALLEST / SCALE))
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):  # also the ticks that are still to come
            for label in axis.get_ticklabels()[:1]:
                axis.set_tick_params(labelsize=label.get_fontsize())
    figure.set_size_inches(drawn, min(height * rows, tallest))
    figure.draw_without_rendering()
    for legend in figure.legends:
        for columns in range(len(legend.get_texts()), 0, -1):
            legend.set_ncols(columns)
            if legend.get_window_extent().width <= figure.bbox.width:
                break
    lines = sum(_wrap(text, 0.98 * figure.bbox.width) for text in figure.texts)
    lines += sum(_wrap_labels(ax) + _turn_ticks(ax) for ax in figure.axes)
    figure.set_size_inches(drawn, min(height * rows + LINE * lines, tallest))


def _fold(figure: Figure, drawn: float) -> float:
    """Move panels into further rows, until each keeps its width; returns how many times as many."""
    specs = [ax.get_subplotspec() for ax in figure.axes]
    grids = {id(spec.get_gridspec()): spec.get_gridspec() for spec in specs if spec is not None}
    if len(grids) != 1:
        return 1.0
    (grid,) = grids.values()
    shares = np.asarray(grid.get_width_ratios(), dtype=float)
    widest = figure.get_figwidth() * float(shares.max() / shares.sum())
    before = grid.ncols
    columns = max(1, min(before, math.floor(drawn / (SQUEEZE * widest))))
    while grid.nrows > 1 and before % columns:
        columns -= 1  # the panels of a row stay together
    if columns == before:
        return 1.0
    rows = math.ceil(len(figure.axes) / columns)
    columns = math.ceil(len(figure.axes) / rows)
    new = GridSpec(rows, columns, figure=figure)
    panels = list(figure.axes)
    for place, ax in enumerate(panels):
        ax.set_subplotspec(new[divmod(place, columns)])
        leader = panels[place - place % before]  # of its old row
        if place % columns == 0 and ax.get_shared_y_axes().joined(ax, leader):
            ax.tick_params(labelleft=True)
            ax.set_ylabel(leader.get_ylabel())
    for text in figure.texts:
        for side, folded in PLACES.items():
            text.set_text(text.get_text().replace(side, folded))
    return rows / grid.nrows


def _turn_ticks(ax: Axes) -> int:
    """Set names below an axis upright where neighbours overlap; returns lines that this takes."""
    shown = [label for label in ax.get_xticklabels() if label.get_text() and label.get_visible()]
    boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.x0)
    if all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes)):
        return 0
    ax.tick_params(axis="x", labelrotation=90)
    return math.ceil(max(box.width for box in boxes) / (LINE * ax.figure.dpi))


def _wrap_labels(ax: Axes) -> int:
    """Break titles and labels that are longer than their axes; returns how many lines that adds."""
    box = ax.get_window_extent()
    added = 0
    for where in ("left", "center"):
        title = ax.get_title(loc=where)
        if title:
            (text,) = [t for t in ax.findobj(Text) if t.get_text() == title][:1]
            added += _wrap(text, box.width)
    _wrap(ax.yaxis.label, box.height, upright=True)
    return added + _wrap(ax.xaxis.label, box.width)


def _width(artist: Text, upright: bool = False) -> float:
    box = artist.get_window_extent()
    return box.height if upright else box.width


def _wrap(text: Text, width: float, upright: bool = False) -> int:
    """Break a text between words where it is wider than ``width`` pixels; returns lines added."""
    was = text.get_text()
    if not was or _width(text, upright) <= width:
        return 0
    lines: list[str] = []
    for word in was.split():
        longer = " ".join([*lines[-1:], word])
        text.set_text(longer)
        lines[-1:] = [longer] if lines and _width(text, upright) <= width else [*lines[-1:], word]
    text.set_text("\n".join(lines))
    return len(lines) - was.count("\n") - 1


def png(figure: Figure, metadata: dict[str, None]) -> bytes:
    """The figure as a PNG that says its printed size."""
    out = io.BytesIO()
    resolution = {"dpi": (DPI, DPI)}
    figure.savefig(out, format="png", dpi=DPI * SCALE, metadata=metadata, pil_kwargs=resolution)
    return out.getvalue()


def svg(figure: Figure, metadata: dict[str, None]) -> bytes:
    """The figure as an SVG; the view box keeps the drawn size, width and height are the printed."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata=metadata)

    def scaled(found: re.Match[bytes]) -> bytes:
        return b'%s="%.6gpt"' % (found[1], float(found[2]) * SCALE)

    return re.sub(rb'\b(width|height)="([\d.]+)pt"', scaled, out.getvalue(), count=2)


def printed_pdf(figure: Figure, metadata: dict[str, None]) -> bytes:
    """The figure as a PDF page of its printed size; only the page's matrix scales what is drawn."""
    out = io.BytesIO()
    dpi = figure.dpi
    figure.dpi = 72  # a PDF's units
    width, height = figure.get_size_inches()
    file = pdf.PdfFile(out, metadata=metadata)
    file.newPage(width * SCALE, height * SCALE)
    # Paths are cut and markers left out beyond these, in the units that they are drawn in.
    file.width, file.height = width, height
    file.output(SCALE, 0, 0, SCALE, 0, 0, pdf.Op.concat_matrix)
    renderer: Any = MixedModeRenderer(
        figure, width, height, DPI * SCALE, pdf.RendererPdf(file, DPI * SCALE, height, width)
    )
    figure.draw(renderer)
    renderer.finalize()
    file.finalize()
    file.close()
    figure.dpi = dpi
    return out.getvalue()


#: File ending -> writer of the printed size.
WRITERS = {"png": png, "svg": svg, "pdf": printed_pdf}
