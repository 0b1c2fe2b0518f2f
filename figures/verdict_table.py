"""The verdict table: every figure's claims, judged, as text, CSV and the README's block.

The README's block is made from committed records only, so it does not depend on the machine that
writes it; ``tests/cpu/test_figures_readme.py`` fails when it is stale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path

import pandas
from tabulate import tabulate

from figures.common import Verdict, module, names
from repro.experiments import tidy

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- verdicts: written by `make readme` from the committed records -->"
END = "<!-- end of verdicts -->"
HEADERS = ("claim", "what it says", "predicted", "measured", "published", "verdict", "recheck")


def collect(*, local: bool = True) -> list[Verdict]:
    """The verdicts of all figures, in the order of their claims' names."""
    rows: list[Verdict] = []
    for name in names():
        figure = module(name)
        if hasattr(figure, "verdicts"):
            rows += figure.verdicts(tidy(figure.EXPERIMENTS, local=local))
    twice = {r.claim for r in rows if sum(s.claim == r.claim for s in rows) > 1}
    if twice:
        raise ValueError(f"claims judged twice: {sorted(twice)}")
    return sorted(rows, key=lambda r: _natural(r.claim))


def text(rows: Sequence[Verdict], form: str = "github") -> str:
    """The table through tabulate; ``form`` is one of its formats."""
    if form == "github":
        cells = [[c.replace("|", "\\|") for c in astuple(r)] for r in rows]
        return tabulate(cells, HEADERS, tablefmt="github", disable_numparse=True)
    widths = [12, 34, 22, 26, 20, 30, 0]
    shown = [astuple(r)[:-1] for r in rows]
    return tabulate(
        shown, HEADERS[:-1], tablefmt=form, maxcolwidths=widths[:-1], disable_numparse=True
    )


def table(rows: Sequence[Verdict]) -> pandas.DataFrame:
    """The verdicts as a frame."""
    return pandas.DataFrame([astuple(r) for r in rows], columns=[f.name for f in fields(Verdict)])


def readme_with(block: str, readme: str) -> str:
    """The README's text with this block between its markers; ValueError if they are missing."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md needs exactly one {BEGIN!r} and one {END!r}")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def judged(measured: float, predicted: float, tolerance: float) -> str:
    """ "holds" with the deviation, or "does not hold" with it; tolerance is relative."""
    if not math.isfinite(measured):
        return "open: not measured"
    if not math.isfinite(predicted):
        return "open: not predicted"
    if predicted == 0:
        raise ValueError(f"cannot judge {measured} against a prediction of 0")
    deviation = measured / predicted - 1
    shown = "exactly" if deviation == 0 else f"{deviation:+.2%}"
    word = "holds" if abs(deviation) <= tolerance else "does not hold"
    return f"{word} ({shown}; tolerance {tolerance:.1%})"


def _natural(claim: str) -> tuple[int, int, str]:
    """K1, K2, ..., K10 first and in numeric order, then the rest by name."""
    if claim.startswith("K") and claim[1:].isdigit():
        return (0, int(claim[1:]), claim)
    return (1, 0, claim)
