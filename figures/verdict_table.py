"""The verdict table: every claim, judged, as text, CSV, LaTeX, pages and blocks of the README.

The README shows the headline rows, ``docs/claims.md`` all of them. Both are made from committed
records only, so they do not depend on the machine that writes them;
``tests/claims_figures/test_figures_readme.py`` fails when they are stale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas
from tabulate import tabulate

from figures.common import module, names
from repro import claims
from repro.claims import Claim, Evidence, Origin, Verdict
from repro.claims.tolerances import EXPONENT, TABLE
from repro.measuring.records import load

README = Path(__file__).resolve().parent.parent / "README.md"
CLAIMS = README.parent / "docs" / "claims.md"
#: Stands for the claims that no figure shows.
APART = "repro.claims"
#: The claims of the README's first screen; each must exist.
HEADLINES = (
    "FA-1 Fig. 2 middle",
    "FA-1 Fig. 2 left, flash",
    "FA-1 20x memory",
    "Rabe & Staats, inference",
    "Chen Fig. 7",
    "K2",
)
#: The numbers that a cell begins with, and their unit: "2.1, 2.6, 2.9x", "0.40 to 0.46", "4.43 GB".
NUMBERS = re.compile(r"\d[\d.]*x?(?:(?:, | to )\d[\d.]*x?)*(?: (?:[kMGT]B|%))?")
#: Parts of the README that are generated: name -> the comment lines around it.
MARKERS = {
    name: (f"<!-- {name}: written by `make readme` -->", f"<!-- end of {name} -->") for name in ("untimed", "verdicts")
}
#: The site's start page, and the comment lines around what it has from the README.
INDEX = CLAIMS.parent / "pages" / "index.md"
START = ("<!-- written by `make readme` from README.md -->", "<!-- end of README.md -->")
#: Kernels of this package, by the names that records carry.
OUR_KERNELS = re.compile(r"(standard|flash|flash1|gemm|fused)(-(?!attn|eager|sdpa).*)?")
UNTIMED = (
    "**Our own kernels have not been timed on a GPU yet.** The H200's rows are of PyTorch's, "
    "cuDNN's and FlashAttention's kernels; ours are executed on a CPU, their machine code too, and counted."
)
#: Columns of the LaTeX tables, with their shares of a line.
LATEX_COLUMNS = {
    "claim": 0.12,
    "what it says": 0.2,
    "predicted": 0.15,
    "measured": 0.17,
    "published": 0.09,
    "verdict": 0.09,
    "evidence": 0.09,
}
#: Signs that LaTeX's text fonts lack -> what draws them.
_SIGNS: dict[str, str | int | None] = {
    "Ψ": r"$\Psi$",
    "Θ": r"$\Theta$",
    "²": r"$^2$",
    "∘": r"$\circ$",
    "√": r"$\surd$",
    "←": r"$\leftarrow$",
    "→": r"$\rightarrow$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "µ": r"$\mu$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "≈": r"$\approx$",
    "–": "--",
    "±": r"$\pm$",
}
TITLES = {
    Origin.PAPER: "Claims of the papers",
    Origin.NOTE: "Claims and faults of the study notes",
    Origin.OURS: "Claims of this package about its own models and kernels",
}


def collect(*, local: bool = True) -> list[Claim]:
    """Every claim, judged, as :func:`ordered`."""
    return ordered(claims.judge(local=local))


def judges() -> tuple[str, ...]:
    """What :func:`judge` takes: :data:`APART`, then every figure."""
    return (APART, *names())


def judge(name: str, frame: pandas.DataFrame | None = None, *, local: bool = True) -> list[Claim]:
    """The claims that a figure shows, or those that none does (:data:`APART`).

    frame: the figure's, where it is at hand.
    """
    figures = set(names())
    wanted = [
        row.name for row in claims.rows().values() if row.shown == name or (name == APART and row.shown not in figures)
    ]
    known = {} if frame is None else {module(name).EXPERIMENTS: frame}
    return claims.judge(wanted, local=local, frames=known)


def ordered(judged: Sequence[Claim]) -> list[Claim]:
    """Papers first, in the order of their names."""
    origins = list(Origin)
    return sorted(judged, key=lambda row: (origins.index(row.origin), _natural(row.name)))


def cells(row: Claim) -> dict[str, str]:
    """A claim as a row of words, by column."""
    return {
        "claim": row.name,
        "what it says": row.statement,
        "source": row.source,
        "predicted": row.predicted,
        "measured": row.measured,
        "published": row.published,
        "evidence": row.evidence,
        "verdict": row.verdict,
        "found": row.findings,
        "what would overturn it": row.falsifier,
        "conditions": row.conditions or "like for like",
        "chosen after seeing the data": row.chosen or "nothing",
        "consistent at most": row.other,
        "within limits at most": row.partial,
        "a test would take": row.needs,
        "prediction": "decides as well" if row.compared else "none on record decides",
        "recheck": row.command,
    }


def text(rows: Sequence[Claim], form: str = "github") -> str:
    """The table through tabulate; ``form`` is one of its formats."""
    if form == "github":
        shown = [cells(row) for row in rows]
        return _github(list(shown[0]) if shown else [], [list(s.values()) for s in shown])
    wanted = {
        "claim": 12,
        "what it says": 30,
        "measured": 26,
        "evidence": 14,
        "verdict": 12,
        "found": 34,
        "what would overturn it": 30,
    }
    lines = [[cells(row)[name] for name in wanted] for row in rows]
    widths = list(wanted.values())
    return tabulate(lines, list(wanted), tablefmt=form, maxcolwidths=widths, disable_numparse=True)


def latex(rows: Sequence[Claim]) -> str:
    """A longtable for each origin, for booktabs; tabulate writes and escapes the rows."""
    parts = ["% Needs \\usepackage{array,booktabs,longtable}; fits a page in landscape."]
    shares = LATEX_COLUMNS.values()
    columns = "".join(rf">{{\raggedright\arraybackslash}}p{{{w}\linewidth}}" for w in shares)
    for origin, title in TITLES.items():
        lines = [[cells(r)[c] for c in LATEX_COLUMNS] for r in rows if r.origin is origin]
        if not lines:
            continue
        written = tabulate(lines, list(LATEX_COLUMNS), "latex_booktabs", disable_numparse=True)
        # Its own environment, rules included, fits one page and breaks no line of text.
        _, _, head, _, *body, _, _ = _without_unicode(written).splitlines()
        parts += [
            "",
            rf"\begin{{longtable}}{{@{{}}{columns}@{{}}}}",
            rf"\caption{{{title}}}\\",
            r"\toprule",
            head,
            r"\midrule",
            r"\endhead",
            r"\bottomrule",
            r"\endfoot",
            *body,
            r"\end{longtable}",
        ]
    return "\n".join(parts) + "\n"


def _without_unicode(written: str) -> str:
    """LaTeX with commands for signs that are not ASCII, as far as :data:`_SIGNS` has them."""
    written = re.sub("(.)\u0303", r"$\\tilde{\1}$", written)  # a tilde above the letter before it
    return written.translate(str.maketrans(_SIGNS))


def changes(before: Sequence[Claim], after: Sequence[Claim]) -> list[str]:
    """Lines: each claim whose verdict or evidence new records have changed, with what was found."""
    old = {row.name: row for row in before}
    lines = []
    for row in after:
        was = old.get(row.name)
        then = ("not tested", "none") if was is None else (str(was.verdict), was.evidence)
        now = (str(row.verdict), row.evidence)
        if now != then:
            lines.append(f"{row.name}: {then[0]} ({then[1]}) -> {now[0]} ({now[1]}): {row.findings}")
    return [f"claims that change: {len(lines)} of {len(after)}", *lines]


def table(rows: Sequence[Claim]) -> pandas.DataFrame:
    """The claims as a frame of words."""
    return pandas.DataFrame([cells(row) for row in rows])


def readme_with(blocks: Mapping[str, str], readme: str) -> str:
    """The README's text with these blocks between their markers; ValueError if one is missing."""
    for name, block in blocks.items():
        begin, end = MARKERS[name]
        if readme.count(begin) != 1 or readme.count(end) != 1:
            raise ValueError(f"README.md needs exactly one {begin!r} and one {end!r}")
        before, rest = readme.split(begin)
        readme = f"{before}{begin}\n\n{block}\n\n{end}{rest.split(end)[1]}"
    return readme


def blocks(rows: Sequence[Claim]) -> dict[str, str]:
    """The generated parts of the README, from the verdicts on committed records."""
    return {"untimed": untimed(), "verdicts": headlines(rows)}


def untimed(*, local: bool = False) -> str:
    """Whether a GPU has timed a kernel of ours: a sentence while none has, else which has."""
    every = {e for name in names() for e in module(name).EXPERIMENTS}
    timed = {
        r.device
        for r in load(sorted(every), local=local)
        if r.source == "measured"
        and r.value is not None
        and r.metric.startswith("time")
        and r.device is not None
        and "NVIDIA" in r.device.upper()
        and OUR_KERNELS.fullmatch(r.implementation)
    }
    return f"Our kernels have been timed on: {', '.join(sorted(timed))}." if timed else UNTIMED


def headlines(rows: Sequence[Claim]) -> str:
    """The headline claims, numbers only; KeyError when one of them is judged no more."""
    by_name = {row.name: row for row in rows}
    lines = []
    for name in HEADLINES:
        row = by_name[name]
        statement = f"[{row.statement.partition(':')[0]}](docs/claims.md#{anchor(row.name)})"
        values = (numbers(each) for each in (row.predicted, row.measured, row.published))
        lines.append([f"{statement}, *{row.source}*", *values, f"**{row.verdict}**"])
    return _github(["claim", "predicted", "measured", "published", "verdict"], lines)


def numbers(text: str) -> str:
    """What a cell begins with, as far as it is numbers and a unit; ValueError where it is none."""
    found = NUMBERS.match(text)
    if found is None:
        raise ValueError(f"{text!r} does not begin with a number")
    return found[0]


def start_page(readme: str, page: str) -> str:
    """``docs/pages/index.md`` with what the README begins with and its three commands."""
    opening = readme.partition("\n\n")[2].partition("## Install")[0]
    commands = readme[readme.index("## Three commands") : readme.index("## Use it")]
    text = re.sub(r"<!-- .*? -->\n+", "", opening + commands)
    text = text.replace("](docs/pages/", "](").replace("](docs/", "](")
    begin, end = START
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{rest.split(end)[1]}"


def claims_page(rows: Sequence[Claim]) -> str:
    """``docs/claims.md``: an index of all claims, and what is limited, refuted or not tested."""
    parts = [
        "# Every claim, judged",
        untimed(),
        "Written by `make readme` from the committed records. `python -m repro judge NAME` says "
        "all of one claim; `make docs` and `make report` have all of them. A verdict is computed "
        "from ranges that follow from the kind of quantity (the last table), and a claim "
        "with several numbers is as good as its weakest. What was run, ran on the machine that is "
        "named: bytes that were executed and counted on the host are those at the SM boundary, and "
        "say nothing about HBM or time.",
        card_rows(rows),
        "![Every claim by its verdict](images/verdicts.svg)",
        _github(
            ["verdict", "claims", "meaning"],
            [[f"**{v}**", str(sum(r.verdict is v for r in rows)), v.meaning] for v in reversed(Verdict)],
        ),
        "Evidence, the strongest kind first: " + "; ".join(Evidence) + ".",
    ]
    for origin, title in TITLES.items():
        lines = [
            [f'<a id="{anchor(r.name)}"></a>{r.name}', r.statement, f"**{r.verdict}**", r.evidence]
            for r in rows
            if r.origin is origin
        ]
        parts += [f"## {title}", _github(["claim", "what it says", "verdict", "evidence"], lines)]
    for title, verdict in (("Refuted", Verdict.REFUTED), ("Reproduced within limits", Verdict.WITHIN_LIMITS)):
        lines = [
            [r.name, r.findings, r.partial or r.conditions or "like for like"] for r in rows if r.verdict is verdict
        ]
        parts += [f"## {title}", _github(["claim", "found", "conditions"], lines)]
    needed = [
        [r.name, r.needs or "records: see `python -m repro judge`"] for r in rows if r.verdict is Verdict.NOT_TESTED
    ]
    parts += ["## Not tested", _github(["claim", "a test would take"], needed)]
    parts += ["## How far a number may be off", tolerance_table()]
    return "\n\n".join(parts) + "\n"


def card_rows(rows: Sequence[Claim]) -> str:
    """Which claims nobody can judge anew without a card: records of theirs are of one."""
    needed = []
    for row in rows:
        if not row.needs and not any(part.decides.evidence.measured for part in row.parts):
            continue
        for name in claims.rows()[row.name].experiments:
            cards = {str(r.device) for r in load([name], local=False) if r.source == "measured"}
            if row.name not in needed and any("NVIDIA" in card for card in cards):
                needed.append(row.name)
    return (
        "Nobody can judge these anew without the card that is named in them, on which `make gpu-run` "
        "measures their experiments: " + "; ".join(needed) + "."
    )


def tolerance_table() -> str:
    """The ranges by kind of quantity (``repro.claims.tolerances``)."""
    lines = [
        [
            kind.kind,
            f"{kind.share:g}" if kind is EXPONENT else f"{kind.share:.1%}",
            "-" if kind.factor is None else f"a factor of {kind.factor:g}",
            kind.because,
        ]
        for kind in TABLE
    ]
    return _github(["kind", "agrees within", "within limits", "because"], lines)


def claims_in_full(rows: Sequence[Claim]) -> str:
    """The site's page of every claim with all that is known (``docs/hooks.py`` makes it)."""
    parts = ["# Every claim in full"]
    for row in rows:
        words = cells(row)
        details = [
            f"- {name}: `{word}`" if name == "recheck" else f"- {name}: {word}"
            for name, word in words.items()
            if name not in ("claim", "what it says", "verdict") and word not in ("", "-")
        ]
        parts += [f"## {row.name}", f"{row.statement}: **{row.verdict}**.", "\n".join(details)]
    return "\n\n".join(parts) + "\n"


def anchor(name: str) -> str:
    """The address of a heading as GitHub and MkDocs write it."""
    kept = re.sub(r"[^\w\- ]", "", name.lower())
    return kept.replace(" ", "-")


def _github(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table without padding, so that a changed cell changes one line."""
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rows = [list(headers), ["---"] * len(headers), *escaped]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _natural(name: str) -> tuple[int, int, str]:
    """K1, K2, ..., K10 first and in numeric order, then F1 ... F7, then the rest by name."""
    found = re.match(r"([KF])(\d+)(?:,|$)", name)
    if found:
        return ("KF".index(found[1]), int(found[2]), name)
    return (2, 0, name)
