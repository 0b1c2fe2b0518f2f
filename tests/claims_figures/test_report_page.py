"""The report is one valid file: nothing external, unique ids, all formulas and data."""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pandas
import pytest

from analysis import symbolic
from analysis.checkpointing import closed_forms
from figures import common, gallery
from figures.common import Drawing
from figures.report import formulas, page, predictions, provenance
from repro.claims import Evidence, Finding, Part, Verdict, rows
from repro.experiments import record
from repro.measuring import records

VOID = {"meta", "input", "br", "wbr", "path", "use", "link"}


class Structure(HTMLParser):
    """Ids, targets of links, and whether tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.external: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("href", "src", "xlink:href") and value:
                if value.startswith("#"):
                    self.targets.append(value[1:])
                elif not value.startswith("data:"):
                    self.external.append(value)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    import matplotlib.pyplot as plt

    tmp_path = tmp_path_factory.mktemp("figures")
    common.style()
    evidence, nan = Evidence.COUNTED, float("nan")
    parts_of = {
        Verdict.REPRODUCED: Part(what="a < b & c", value=1, low=0, evidence=evidence),
        Verdict.WITHIN_LIMITS: Part(what="x", value=3, high=2, limits=(-math.inf, 4), why="so", evidence=evidence),
        Verdict.CONSISTENT: Part(what="x", value=1, low=0, evidence=Evidence.DERIVED),
        Verdict.REFUTED: Part(what="x", value=-1, low=0, evidence=evidence),
        Verdict.NOT_TESTED: Part(what="x", value=nan, low=0, evidence=evidence),
    }
    judged = [rows()["SM boundary"].found(Finding(parts=[part])) for part in parts_of.values()]
    assert [row.verdict for row in judged] == list(parts_of)
    drawn = {}
    boxes = {}
    for name in ("fa1_fig2_middle", "two_levels"):
        figure, axes = plt.subplots()
        axes.plot([1, 2], [3, 4], "o", label="points")
        axes.set_title("same <picture> twice")
        axes.legend()
        table = pandas.DataFrame({"x": range(300), "text": ["<&>"] * 300})
        common.save(name, Drawing(figure, table), tmp_path)
        drawn[name] = page.figure_section(name, tmp_path / f"{name}.svg", tmp_path / f"{name}.csv")
        boxes[name] = page.view_box(tmp_path / f"{name}.svg")
    listed = list(predictions.rows(["llama3-8b"]))
    sections = [
        ("overview", "Overview", page.overview_section(boxes, gallery.grouped())),
        ("verdicts", "Verdicts", page.verdict_section(judged)),
        ("figures", "Figures", page.figures_section(drawn, gallery.grouped())),
        ("predictions", "Predictions", predictions.section(listed)),
        ("formulas", "Formulas", page.formula_section(formulas.sections())),
        ("provenance", "Provenance", page.provenance_section(provenance.files())),
    ]
    return page.page(sections)


def test_the_page_needs_nothing_from_outside_and_its_links_lead_somewhere(report: str) -> None:
    structure = Structure()
    structure.feed(report)
    assert structure.open == []
    assert structure.external == []
    assert not re.search(r"@import|fetch\(|XMLHttpRequest|<link\b|src=", report)
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", report))
    assert all("www.w3.org" in a for a in addresses), addresses  # names of XML namespaces
    twice = {i for i in structure.ids if structure.ids.count(i) > 1}
    assert twice == set()
    missing = set(structure.targets) - set(structure.ids)
    assert missing == set()


def test_figures_are_shown_by_paper_and_follow_the_theme(report: str) -> None:
    small = report[report.index('id="thumbnails"') : report.index('<section id="verdicts"')]
    assert re.findall(r"<h3>([^<]+)</h3><ul", small) == ["FlashAttention 2022", gallery.OURS]
    assert re.findall(r'<a href="#(\w+)"', small) == ["fa1_fig2_middle", "two_levels"]
    large = report[report.index('class="headlines"') : report.index('id="thumbnails"')]
    assert re.findall(r'<a href="#(\w+)"', large) == ["fa1_fig2_middle"]
    pictures = "".join(re.findall(r"<svg.*?</svg>", report, re.DOTALL))
    assert "fill: var(--page)" in pictures
    assert not any(colour in pictures for colour in page.THEMED)


def test_data_is_carried_by_the_page(report: str) -> None:
    match = re.search(r'download="fa1_fig2_middle\.csv\.gz" href="data:application/gzip;base64,([^"]+)"', report)
    assert match
    assert gzip.decompress(base64.b64decode(match[1])).decode().splitlines()[1] == "0,<&>"
    assert "Data, 300 rows (the first 200 here)" in report
    assert "<td><&></td>" not in report


def test_verdicts_are_counted_and_marked(report: str) -> None:
    for kind in Verdict:
        assert f"{kind}: 1</button>" in report
        assert f'class="mark {page.slug(kind)}"' in report
    assert "a &lt; b &amp; c" in report


def test_every_formula_is_typeset_and_well_formed() -> None:
    listed = [f for s in formulas.sections() for f in s.formulas]
    for formula in listed:
        root = ET.fromstring(formula.math())
        assert root.tag == "math"
        assert len(list(root.iter())) > 1
        assert formula.source
    shown = {formula.expression for formula in listed}
    for each in symbolic.FORMS.values():
        assert set(each.values()) <= shown
    for closed in closed_forms.ALL:
        assert {closed.peak, closed.forwards} <= shown
    assert set(formulas.SOURCES) == set(symbolic.FORMS)


def test_every_record_has_its_origin(tmp_path: Path) -> None:
    rows = [
        record(
            {},
            experiment="x",
            implementation="a",
            metric="n",
            source="measured",
            value=1,
            unit="1",
            device="card",
            tool="clock",
            date="2026-01-02",
            torch="2.0",
            cell="c",
        ),
        record(
            {},
            experiment="x",
            implementation="a",
            metric="n",
            source="measured",
            error="out of memory",
            device="card",
            tool="clock",
            date="2026-01-02",
            torch="2.0",
        ),
        record(
            {},
            experiment="x",
            implementation="a",
            metric="n",
            source="published",
            value=1,
            unit="1",
            origin="Paper, Table 1",
            confidence="table",
        ),
    ]
    path = tmp_path / "m" / "x.jsonl"
    records.write(path, rows)
    (file,) = provenance.files(tmp_path)
    assert file.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert file.records == 3
    measured, published = file.origins
    assert (measured.records, measured.failed, measured.where) == (2, 1, "card")
    assert measured.versions == "torch 2.0"
    assert (published.where, published.how) == ("Paper, Table 1", "table")


def test_what_came_from_elsewhere_is_text_and_never_html(tmp_path: Path) -> None:
    """Folder and file names and every field: of records, of claims, of a figure's data."""
    bad = '"><img src=x onerror=alert(1)>'
    written_rows = [
        record(
            {},
            experiment="x",
            implementation=bad,
            metric=bad,
            source="measured",
            value=1,
            unit=bad,
            device=bad,
            tool=bad,
            date=bad,
            torch=bad,
            commit=bad,
            driver=bad,
        ),
        record(
            {},
            experiment="x",
            implementation="a",
            metric="n",
            source="published",
            value=1,
            unit="1",
            origin=bad,
            confidence=bad,
        ),
    ]
    name = bad.replace("/", "")
    records.write(tmp_path / name / f"{name}.jsonl", written_rows)
    part = Part(what=bad, value=1, low=0, evidence=Evidence.COUNTED)
    finding = Finding(parts=[part], measured=bad, predicted=bad, published=bad)
    row = rows()["SM boundary"].found(finding)
    written = page.provenance_section(provenance.files(tmp_path)) + page.verdict_section([row])
    assert "onerror" in written
    assert "<img" not in written
    structure = Structure()
    structure.feed(written)
    assert structure.open == []
