"""The figures as a list: small pictures of some, a table of all of them in the documentation.

A figure belongs to the paper that the first line of its module names, "FlashAttention 2022, Fig. 2
middle: memory accesses …"; the others show something of this package.
"""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.figure import Figure

from figures import _paper, common
from repro.experiments import experiment
from repro.experiments import names as experiment_names
from repro.measuring.records import load

PAGE = Path(__file__).resolve().parent.parent / "docs" / "pages" / "figures.md"
OURS = "Of this package"
#: The most telling figures, committed as docs/images/NAME.svg; the README shows the first.
CHOSEN = (
    "fa1_fig2_middle",
    "fa1_fig2_left",
    "fa1_fig3_memory",
    "fa1_fig1_right",
    "checkpoint_layer_bytes",
    "checkpoint_pareto",
    "traffic_attribution",
    "two_levels",
    "time_predicted",
)
_PAPER = re.compile(r"((?:[A-Z][\w-]+)(?: et al\.)? \d{4}), ([^:]+): (.+)")


def subject(name: str) -> tuple[str, str]:
    """(paper or :data:`OURS`, what the figure shows), from the first line of its module."""
    first = (common.module(name).__doc__ or "").strip().splitlines()[0]
    found = _PAPER.fullmatch(first)
    return (found[1], f"{found[2]}: {found[3]}") if found else (OURS, first)


def grouped() -> dict[str, list[str]]:
    """Figures by paper, the oldest paper first and ours last."""
    groups: dict[str, list[str]] = {}
    for name in common.names():
        groups.setdefault(subject(name)[0], []).append(name)
    return {paper: groups[paper] for paper in sorted(groups, key=lambda p: (p == OURS, p[-4:], p))}


def thumbnails(columns: int = 3) -> str:
    """The chosen pictures with a line each, by paper; a click opens the picture."""
    lines = ["<table>"]
    for paper, members in grouped().items():
        chosen = [name for name in CHOSEN if name in members]
        if not chosen:
            continue
        lines.append(f'<tr><th colspan="{columns}" align="left">{paper}</th></tr>')
        for start in range(0, len(chosen), columns):
            lines.append("<tr>")
            for name in chosen[start : start + columns]:
                picture = f"images/{name}.svg"
                lines.append(
                    f'<td width="{100 // columns}%" valign="top"><a href="{picture}">'
                    f'<img src="{picture}" alt="{name}"></a><br>{subject(name)[1]}</td>'
                )
            lines.append("</tr>")
    return "\n".join([*lines, "</table>"])


def caption(name: str, figure: Figure) -> str:
    """One paragraph for a paper: what the figure shows, axes with their units, the small print."""
    paper, shown = subject(name)
    panels = []
    for ax in figure.axes:
        axes = " against ".join(label for label in (ax.get_ylabel(), ax.get_xlabel()) if label)
        title = ax.get_title(loc="left") or ax.get_title()
        panels.append(": ".join(part for part in (title, axes) if part))
    parts = [
        shown if paper == OURS else f"{paper}, {shown}",
        "; ".join(panel for panel in panels if panel),
        *(text.get_text() for text in figure.texts),
    ]
    said = (" ".join(part.split()).rstrip(".") for part in parts)
    return ". ".join(part for part in said if part) + ".\n"


def page() -> str:
    """``docs/pages/figures.md``: every figure, its command, the time to measure, whose records."""
    parts = [
        "# Figures",
        "Written by `make readme`. `make figures` draws all of them to the folder figures/out, "
        "`make figures/out/NAME.svg` one with just what it needs. *Measuring* is about the time "
        "that its experiments take on two cores; what is drawn only sets recorded and published "
        "numbers beside formulas.",
        "`make figures STYLE=paper FORMATS=pdf` draws them for a paper, to figures/out/paper: "
        "3.35 or 6.75 inches wide, text of 6 points or more, fonts embedded, a caption in "
        "NAME.txt. Panels that would "
        "become too narrow go into further rows; these need a page turned on its side (9 inches): "
        + ", ".join(f"`{name}`" for name in sorted(_paper.TURNED))
        + ".",
        thumbnails(),
    ]
    for paper, members in grouped().items():
        rows = ["| figure | what it shows | measuring | records of |", "|---|---|---|---|"]
        for name in members:
            shown = common.module(name).EXPERIMENTS
            known = [experiment(e) for e in shown if e in experiment_names()]
            seconds = sum(e.seconds for e in known if e.device in ("host", "cpu"))
            machines = {r.extra["machine"] for r in load(shown, local=False)}
            if seconds:
                machines.add("host")
            took = f"{max(1, round(seconds))} s" if seconds else "drawn only"
            rows.append(f"| `{name}` | {subject(name)[1]} | {took} | {', '.join(sorted(machines))} |")
        parts += [f"## {paper}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"
