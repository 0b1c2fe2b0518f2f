"""The verdict table: every figure's claims, judged, as text, CSV, a page and a block of the README.

The README shows the headline rows, ``docs/claims.md`` all of them. Both are made from committed
records only, so they do not depend on the machine that writes them;
``tests/cpu/test_figures_readme.py`` fails when they are stale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path

import pandas
from tabulate import tabulate

from figures.common import Verdict, module, names
from repro import claims
from repro.experiments import experiment, tidy
from repro.experiments import names as experiment_names
from repro.records import load

README = Path(__file__).resolve().parent.parent / "README.md"
CLAIMS = README.parent / "docs" / "claims.md"
#: The claims of the README's first screen; each must exist.
HEADLINES = (
    "FA-1 Fig. 2 middle",
    "FA-1 Fig. 2 left, standard",
    "FA-1 Fig. 2 left, flash",
    "SM boundary",
    "HBM behind L2",
    "FA-1 Fig. 3 right",
    "K3, speed",
    "K2",
    "K6",
    "K10",
)
#: Parts of the README that are generated: name -> the comment lines around it.
MARKERS = {
    name: (f"<!-- {name}: written by `make readme` -->", f"<!-- end of {name} -->")
    for name in ("verdicts", "figures")
}
HEADERS = ("claim", "what it says", "predicted", "measured", "published", "verdict", "recheck")


def collect(*, local: bool = True) -> list[Verdict]:
    """The verdicts of all figures and of ``repro.claims``, in the order of their claims' names.

    Every claim of ``repro.claims.CATALOGUE`` has a row, open where nothing judges it.
    """
    rows: list[Verdict] = []
    for name in names():
        figure = module(name)
        if hasattr(figure, "verdicts"):
            rows += figure.verdicts(tidy(figure.EXPERIMENTS, local=local))
    judged_here = claims.judge(local=local)
    judged_here += claims.missing([r.claim for r in rows] + [c.claim for c in judged_here])
    rows += [_row(claim) for claim in judged_here]
    twice = {r.claim for r in rows if sum(s.claim == r.claim for s in rows) > 1}
    if twice:
        raise ValueError(f"claims judged twice: {sorted(twice)}")
    return sorted(rows, key=lambda r: _natural(r.claim))


def _row(claim: claims.Claim) -> Verdict:
    """A claim that no figure judges, as a row; what agreement means goes into its verdict."""
    verdict = claim.verdict
    if claim.tolerance != "-" and not verdict.startswith("open"):
        verdict += f" (tolerance: {claim.tolerance})"
    return Verdict(
        claim.claim, claim.statement, claim.predicted, claim.measured, claim.published, verdict,
        claim.command,
    )  # fmt: skip


def text(rows: Sequence[Verdict], form: str = "github") -> str:
    """The table through tabulate; ``form`` is one of its formats."""
    if form == "github":
        cells = [[c.replace("|", "\\|") for c in astuple(r)] for r in rows]
        cells = [[*c[:-1], f"`{c[-1]}`" if c[-1] else ""] for c in cells]
        return tabulate(cells, HEADERS, tablefmt="github", disable_numparse=True)
    widths = [12, 34, 22, 26, 20, 30, 0]
    shown = [astuple(r)[:-1] for r in rows]
    return tabulate(
        shown, HEADERS[:-1], tablefmt=form, maxcolwidths=widths[:-1], disable_numparse=True
    )


def table(rows: Sequence[Verdict]) -> pandas.DataFrame:
    """The verdicts as a frame."""
    return pandas.DataFrame([astuple(r) for r in rows], columns=[f.name for f in fields(Verdict)])


def figure_list() -> str:
    """The figures: what each shows, the command, the time to measure, whose records it draws."""
    rows = []
    for name in names():
        figure = module(name)
        first = (figure.__doc__ or "").strip().splitlines()[0]
        known = [experiment(e) for e in figure.EXPERIMENTS if e in experiment_names()]
        seconds = sum(e.seconds for e in known if e.device in ("host", "cpu"))
        machines = {r.extra["machine"] for r in load(figure.EXPERIMENTS, local=False)}
        if seconds:
            machines.add("host")
        rows.append((
            f"[{name}](figures/{name}.py)", first, f"`make figures/out/{name}.svg`",
            f"{max(1, round(seconds))} s" if seconds else "drawn only",
            ", ".join(sorted(machines)),
        ))  # fmt: skip
    headers = ("figure", "what it shows", "command", "measuring", "records of")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def readme_with(blocks: Mapping[str, str], readme: str) -> str:
    """The README's text with these blocks between their markers; ValueError if one is missing."""
    for name, block in blocks.items():
        begin, end = MARKERS[name]
        if readme.count(begin) != 1 or readme.count(end) != 1:
            raise ValueError(f"README.md needs exactly one {begin!r} and one {end!r}")
        before, rest = readme.split(begin)
        readme = f"{before}{begin}\n\n{block}\n\n{end}{rest.split(end)[1]}"
    return readme


def blocks(rows: Sequence[Verdict]) -> dict[str, str]:
    """The generated parts of the README, from the verdicts on committed records."""
    return {"verdicts": headlines(rows), "figures": figure_list()}


def headlines(rows: Sequence[Verdict]) -> str:
    """The headline claims without details; KeyError when one of them is judged no more."""
    by_claim = {row.claim: row for row in rows}
    cells = []
    for claim in HEADLINES:
        row = by_claim[claim]
        short = re.split(r"[(:;]", row.verdict)[0].strip()
        cells.append((row.statement, row.predicted, row.measured, row.published, f"**{short}**"))
    headers = ("claim", "predicted", "measured", "published", "verdict")
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    return tabulate(escaped, headers, tablefmt="github", disable_numparse=True)


def claims_page(rows: Sequence[Verdict]) -> str:
    """``docs/claims.md``: every claim with its verdict in full and the command that rechecks it."""
    kinds = ("holds within limits", "does not hold", "holds", "open")
    counts = dict.fromkeys(kinds, 0)
    for row in rows:
        counts[next(kind for kind in kinds if row.verdict.startswith(kind))] += 1
    return (
        "# Every claim, judged\n\n"
        "Written by `make readme` from the committed records. K and F rows are the claims and the "
        "faults of the study notes this package grew from; the others are headlines of the papers."
        f"\n\nOf {len(rows)} claims {counts['holds']} hold, {counts['holds within limits']} hold "
        f"within limits, {counts['does not hold']} do not hold and {counts['open']} are open.\n\n"
        f"{text(rows)}\n"
    )


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
    """K1, K2, ..., K10 first and in numeric order, then F1 ... F7, then the rest by name."""
    found = re.match(r"([KF])(\d+)(?:,|$)", claim)
    if found:
        return ("KF".index(found[1]), int(found[2]), claim)
    return (2, 0, claim)
