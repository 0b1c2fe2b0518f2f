"""Image files that are the same on every run and every account."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What the ids in an SVG are made from, beside what they name.
HASH_SALT = "recompute-repro"
#: What must not be in a file for two runs to write the same bytes: dates and programs.
UNSAID: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@contextmanager
def own_look() -> Iterator[None]:
    """Within it matplotlib has its own defaults: what a user's matplotlibrc says stays out."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = HASH_SALT
        yield


def settle(figure: Figure) -> None:
    """Lay the figure out once and for all, in positions rounded to a millionth of its size.

    The layout's solver visits its variables in the order of their addresses, so two runs may differ
    in the last bit of a position, and with it in every id that the SVG derives from one.
    """
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)  # without drawing anything: that comes once, at the end
    # Not "none", which leaves a placeholder for which savefig draws everything twice; None is what
    # the style's rcParams say, no engine.
    figure.set_layout_engine(None)
    for ax in figure.axes:
        left, bottom, width, height = ax.get_position(original=True).bounds
        ax.set_position((round(left, 6), round(bottom, 6), round(width, 6), round(height, 6)))
    for text in figure.texts:
        x, y = text.get_position()
        text.set_position((round(x, 6), round(y, 6)))
