"""Puts the report together: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import gzip
import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas

from figures import common, gallery, verdict_table
from figures.report import formulas, predictions, provenance
from repro.claims import Claim, Verdict
from repro.experiments import tidy
from repro.measuring import machine

HERE = Path(__file__).resolve().parent
TITLE = "FlashAttention and gradient checkpointing: predicted, measured, published"
#: Colours of a drawn figure that follow the page's theme: paper, text, small print, grid.
THEMED = {
    "#ffffff": "var(--page)",
    "#000000": "var(--text)",
    "#262626": "var(--text)",
    "#555555": "var(--muted)",
    "#e6e6e6": "var(--line)",
}
#: The picture of all verdicts, which opens the report where it is drawn.
STRIP = "verdicts.svg"
#: So many of the chosen figures open the report.
HEADLINES = 3
#: What matplotlib calls the group that holds a whole picture.
ROOT = "figure_1"
#: Of a claim what its row shows; the rest unfolds below what it says.
COLUMNS = ("claim", "what it says", "predicted", "measured", "published", "verdict", "evidence")
#: Rows of a figure's data shown in the page; the CSV beside them has all.
SHOWN = 200


def write(path: Path, *, out: Path = common.OUT, local: bool = True) -> int:
    """Write the report and return its size in bytes. Figures that ``out`` lacks are drawn first."""
    common.style()
    drawn = {}
    boxes = {}
    for name in common.names():
        svg, data = out / f"{name}.svg", out / f"{name}.csv"
        if not (svg.exists() and data.exists()):
            figure = common.module(name)
            common.save(name, figure.draw(tidy(figure.EXPERIMENTS, local=local)), out)
        drawn[name] = figure_section(name, svg, data)
        boxes[name] = view_box(svg)
    groups = gallery.grouped()
    sections = [
        ("overview", "Overview", overview_section(boxes, groups, strip(out / STRIP))),
        ("verdicts", "Verdicts", verdict_section(verdict_table.collect(local=local))),
        ("predictions", "Predictions", predictions.section()),
        ("figures", "Figures", figures_section(drawn, groups)),
        ("formulas", "Formulas", formula_section(formulas.sections())),
        ("provenance", "Provenance", provenance_section(provenance.files())),
    ]
    text = page(sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    common.write_text(path, text)
    return len(text.encode())


def _part(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def page(sections: Sequence[tuple[str, str, str]]) -> str:
    """The document around the sections (id, title, content)."""
    links = "".join(f'<li><a href="#{i}">{title}</a></li>' for i, title, _ in sections)
    body = "".join(
        f'<section id="{i}" aria-labelledby="{i}-title"><h2 id="{i}-title">{title}</h2>{text}</section>'
        for i, title, text in sections
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{TITLE}</title>\n<style>\n{_part('report.css')}</style>\n"
        '</head>\n<body>\n<a class="skip" href="#overview">Skip to the overview</a>\n'
        f"<header><h1>{TITLE}</h1>"
        f"<p>Version {machine.project_version()}, commit {machine.commit() or 'unknown'}. "
        "Lines are predictions, filled points measurements, hollow points what "
        "the papers print. Everything on this page is in this file.</p></header>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul>'
        '<button type="button" id="theme" hidden>Theme: auto</button></nav>\n'
        f"<main>\n{body}</main>\n<script>\n{_part('report.js')}</script>\n</body>\n</html>\n"
    )


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], label: str) -> str:
    """A table that scrolls sideways by itself, also from the keyboard. Cells are HTML."""
    head = "".join(f'<th scope="col">{h}</th>' for h in headers)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>\n" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def download(content: bytes, name: str, text: str) -> str:
    """A link that saves ``content``, which the page carries compressed, as NAME.gz. ``text`` is
    HTML, ``name`` is not."""
    data = base64.b64encode(gzip.compress(content, mtime=0)).decode()
    saved_as = html.escape(f"{name}.gz")
    return f'<a download="{saved_as}" href="data:application/gzip;base64,{data}">{text}</a>'


def verdict_section(rows: Sequence[Claim]) -> str:
    """How many claims have which verdict, and a table for each origin."""
    counts = Counter(row.verdict for row in rows)
    buttons = "".join(
        f'<button type="button" class="filter" data-kind="{slug(kind)}" aria-pressed="false" '
        f'title="{html.escape(kind.meaning)}">'
        f'<span class="mark {slug(kind)}"></span>{kind}: {counts[kind]}</button>'
        for kind in reversed(Verdict)
    )
    parts = [f'<p>{len(rows)} claims.</p><p class="filters" role="group" aria-label="Show only">{buttons}</p>']
    for origin, title in verdict_table.TITLES.items():
        lines: list[list[str]] = []
        headers: list[str] = []
        for row in (row for row in rows if row.origin is origin):
            words = {name: html.escape(cell) for name, cell in verdict_table.cells(row).items()}
            words["verdict"] = f'<span class="mark {slug(row.verdict)}"></span>{words["verdict"]}'
            words["recheck"] = recheck(row.command)
            more = "".join(f"<dt>{name}</dt><dd>{cell}</dd>" for name, cell in words.items() if name not in COLUMNS)
            words["what it says"] += f"<details><summary>more</summary><dl>{more}</dl></details>"
            headers = list(COLUMNS)
            lines.append([words[name] for name in COLUMNS])
        if lines:
            parts.append(f"<h3>{title}</h3>{table(headers, lines, title)}")
    return "".join(parts)


def recheck(command: str) -> str:
    """The command, breaking at its slashes, and linked to the figure it draws."""
    shown = f"<code>{html.escape(command).replace('/', '/<wbr>').replace('_', '_<wbr>')}</code>"
    drawn = re.search(r"figures/out/(\w+)\.svg", command)
    return f'<a href="#{drawn[1]}">{shown}</a>' if drawn else shown


def slug(text: str) -> str:
    return text.replace(" ", "-")


def view_box(svg: Path) -> str:
    """The ``viewBox`` of a drawn figure, as it is written in the file."""
    found = re.search(r'viewBox="([^"]*)"', svg.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{svg} has no viewBox")
    return found[1]


def strip(svg: Path) -> str:
    """The picture of all verdicts, linked to their table; nothing where it is not drawn."""
    if not svg.exists():
        return ""
    picture = inline(svg.read_text(encoding="utf-8"), "strip", "Every claim by verdict and evidence")
    return f'<a class="scroll picture" href="#verdicts">{picture}</a>'


def overview_section(boxes: Mapping[str, str], groups: Mapping[str, Sequence[str]], opening: str = "") -> str:
    """The strip of verdicts, three figures at full width, then every figure small, by paper.

    boxes: the figures that are drawn, with their view boxes. A small picture is the large one below
        shown a second time, which costs the file nothing.
    opening: comes first.
    """
    chosen = [name for name in gallery.CHOSEN[:HEADLINES] if name in boxes]
    large = "".join(thumbnail(name, boxes[name]) for name in chosen)
    small = []
    for paper, members in groups.items():
        drawn = [name for name in ordered(members) if name in boxes]
        if drawn:
            shown = "".join(thumbnail(name, boxes[name]) for name in drawn)
            head = f"<h3>{html.escape(paper)}</h3>"
            small.append(f'<div class="paper">{head}<ul class="small">{shown}</ul></div>')
    return (
        f'{opening}<ul class="headlines">{large}</ul>'
        '<p class="search" hidden><label>Search the figures <input type="search" '
        'id="figure-search" autocomplete="off"></label></p>'
        f'<div id="thumbnails">{"".join(small)}</div>'
    )


def thumbnail(name: str, box: str) -> str:
    """A figure's picture, shown again and linked to it, over one line of what it shows."""
    said = html.escape(gallery.subject(name)[1])
    return (
        f'<li><a href="#{name}"><svg viewBox="{box}" aria-hidden="true">'
        f'<use href="#{name}-{ROOT}"/></svg><span>{said}</span></a></li>'
    )


def ordered(members: Sequence[str]) -> list[str]:
    """A paper's figures, the chosen ones first."""
    return sorted(members, key=lambda name: (name not in gallery.CHOSEN, name))


def figures_section(drawn: Mapping[str, str], groups: Mapping[str, Sequence[str]]) -> str:
    """The figures in full, by paper."""
    shown = []
    for paper, members in groups.items():
        chosen = [drawn[name] for name in ordered(members) if name in drawn]
        if chosen:
            shown.append(f"<h3>{html.escape(paper)}</h3>{''.join(chosen)}")
    return "".join(shown)


def figure_section(name: str, svg: Path, data: Path) -> str:
    """One figure: the picture, what its module says about it, its data, its command."""
    documentation = (common.module(name).__doc__ or name).strip()
    title, _, rest = documentation.partition("\n\n")
    title = " ".join(title.split())
    paragraphs = "".join(f"<p>{prose(p)}</p>" for p in rest.split("\n\n") if p.strip())
    content = data.read_bytes()
    frame = pandas.read_csv(data, dtype=str, keep_default_na=False)
    more = f" (the first {SHOWN} here)" if len(frame) > SHOWN else ""
    shown = table(
        [html.escape(str(c)) for c in frame.columns],
        ([html.escape(c) for c in row] for row in frame.head(SHOWN).itertuples(index=False)),
        f"Data of {name}",
    )
    return (
        f'<article id="{name}"><h4>{html.escape(title)}</h4>{paragraphs}'
        f'<figure><div class="scroll picture" role="region" tabindex="0" aria-label="{name}">'
        f"{inline(svg.read_text(encoding='utf-8'), name, title)}</div><figcaption>"
        f"<details><summary>Data, {len(frame)} rows{more}</summary>{shown}</details>"
        f"{download(content, f'{name}.csv', f'{name}.csv.gz')} · drawn by "
        f"<code>make figures/out/{name}.svg</code></figcaption></figure></article>"
    )


def prose(text: str) -> str:
    """A docstring's paragraph as HTML: ``code`` in double backticks, the rest as it is."""
    escaped = html.escape(" ".join(text.split()))
    return re.sub(r"``(.+?)``", r"<code>\1</code>", escaped)


def inline(svg: str, name: str, title: str) -> str:
    """An SVG file as an element of the page: no prolog, ids of its own, sized by the page."""
    start = svg.index("<svg")
    body = re.sub(r"<metadata>.*?</metadata>", "", svg[start:], flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'((?:xlink:)?href)="#([^"]+)"', rf'\1="#{name}-\2"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    # Places to a hundredth of a point, which nobody sees: a third of the file.
    body = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda at: re.sub(r"(\.\d\d)\d+", r"\1", at[0]), body)
    body = re.sub(r"\s+", " ", body)
    body = re.sub(r"#[0-9a-f]{6}\b", lambda colour: THEMED.get(colour[0], colour[0]), body)
    head, rest = body.split(">", 1)
    width = re.search(r'width="([\d.]+)pt"', head)
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    points = float(width[1]) if width else 600.0
    return f'{head} role="img" aria-label="{html.escape(title)}" style="max-width:{points * 4 / 3:.0f}px">{rest}'


def formula_section(sections: Sequence[formulas.Section]) -> str:
    """Every closed form with its source."""
    return "".join(
        f"<details><summary>{html.escape(s.title)}</summary><p>{html.escape(s.text)}</p>"
        + table(
            ("quantity", "formula", "source"),
            ((html.escape(f.label), f.math(), html.escape(f.source)) for f in s.formulas),
            s.title,
        )
        + "</details>"
        for s in sections
    )


def provenance_section(files: Sequence[provenance.SourceFile]) -> str:
    """A row per kind of origin; the file itself is a click away."""
    total = sum(f.records for f in files)
    rows = []
    for f in files:
        link = download(f.content, f.name.replace("/", "-"), html.escape(f.name))
        for n, o in enumerate(f.origins):
            failed = f" ({o.failed} failed)" if o.failed else ""
            texts = (o.source, f"{o.records}{failed}", o.where, o.how, o.versions, o.date, o.commit)
            first = f"{link}<br><code>{f.digest[:12]}</code>" if n == 0 else ""
            rows.append([first, *(html.escape(t) for t in texts)])
    headers = (
        "file, SHA-256",
        "source",
        "records",
        "device, or paper",
        "tool, or reading",
        "versions",
        "date",
        "commit",
    )
    return f"<p>{total} records in {len(files)} files under <code>results/</code>.</p>" + table(
        headers, rows, "Provenance"
    )
