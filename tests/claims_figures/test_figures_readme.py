"""The README says what the committed records say."""

import dataclasses
import re
from functools import cache

import pytest

from figures import __main__ as command
from figures import common, gallery, verdict_table
from figures.bytes import memory_hierarchy
from repro import claims
from repro.claims import Verdict, tolerances
from repro.experiments import tidy
from repro.measuring.records import record

ROOT = verdict_table.README.parent


@cache
def committed():
    """Every claim, judged from the committed records."""
    return verdict_table.collect(local=False)


def test_the_generated_tables_are_up_to_date():
    page, rows = verdict_table.README.read_text(), committed()
    blocks = verdict_table.blocks(rows)
    assert verdict_table.readme_with(blocks, page) == page, "run `make readme`"
    start = verdict_table.INDEX.read_text()
    assert verdict_table.start_page(page, start) == start, "run `make readme`"
    assert verdict_table.claims_page(rows) == verdict_table.CLAIMS.read_text(), "run `make readme`"


def test_the_committed_records_support_the_verdicts():
    """What the README states, as numbers: these would change if a record or a formula did."""
    rows = {claim.name: claim for claim in committed()}
    assert rows["K5"].verdict is Verdict.REPRODUCED
    assert rows["SM boundary"].verdict is Verdict.REPRODUCED
    assert rows["FA-1 20x memory"].verdict is Verdict.WITHIN_LIMITS
    assert rows["FA-1 20x memory"].measured.startswith("21.7x")
    assert rows["K2"].verdict is rows["K1"].verdict is Verdict.REFUTED
    assert rows["K4"].verdict is Verdict.NOT_TESTED
    assert rows["FA-1 Fig. 2 left, GFLOPs"].verdict is Verdict.REFUTED
    assert "80 heads in all" in rows["FA-1 Fig. 2 left, GFLOPs"].predicted
    for name in ("FA-1 Fig. 2 left, standard", "FA-1 Fig. 2 left, flash", "FA-1 Fig. 2 middle"):
        assert rows[name].verdict is Verdict.CONSISTENT, rows[name]
    assert rows["FA-1 Fig. 2 left, standard"].measured.startswith("55.34 GB with mask and dropout, 40.36 GB without")


def test_the_first_screen_says_that_our_kernels_are_untimed_while_they_are(monkeypatch):
    page = verdict_table.README.read_text()
    assert page.index("have not been timed on a GPU yet") < page.index("## Install")
    timed = record(
        {},
        experiment="gpu-ladder",
        implementation="flash-sm90",
        metric="time_ms",
        unit="ms",
        source="measured",
        value=1.0,
        device="NVIDIA H200",
    )
    peer = dataclasses.replace(timed, implementation="flash-attn-4 4.0.0b36 (Hopper path)")
    monkeypatch.setattr(verdict_table, "load", lambda *_, **__: [peer])
    assert "not been timed" in verdict_table.untimed()
    monkeypatch.setattr(verdict_table, "load", lambda *_, **__: [peer, timed])
    assert verdict_table.untimed() == "Our kernels have been timed on: NVIDIA H200."


def test_every_row_is_in_the_index_and_the_readme_links_to_it():
    rows = committed()
    page, whole = verdict_table.claims_page(rows), verdict_table.claims_in_full(rows)
    for row in rows:
        assert f'<a id="{verdict_table.anchor(row.name)}"></a>' in page
        assert f"## {row.name}\n" in whole
        assert row.falsifier in whole
        if row.verdict in (Verdict.REFUTED, Verdict.WITHIN_LIMITS):
            assert row.findings.replace("|", "\\|") in page
        assert not row.needs or row.needs in page
    for name in verdict_table.HEADLINES:
        assert f"docs/claims.md#{verdict_table.anchor(name)}" in verdict_table.README.read_text()
    for title in verdict_table.TITLES.values():
        assert f"## {title}\n" in page
    for kind in tolerances.TABLE:
        assert f"| {kind.kind} |" in page
    assert verdict_table.latex(rows).isascii()  # every sign in them has a command
    first = verdict_table.headlines(rows)
    assert len(first.splitlines()) == 2 + len(verdict_table.HEADLINES)
    assert "| predicted | measured | published | verdict" in first.splitlines()[0]
    cells = [cell for line in first.splitlines()[2:] for cell in line.split(" | ")[1:4]]
    assert all(verdict_table.numbers(cell) == cell for cell in cells), "numbers only"
    with pytest.raises(ValueError, match="'not measured' does not begin with a number"):
        verdict_table.numbers("not measured")


def test_the_latex_tables_are_balanced_and_escaped():
    untested = claims.Finding(parts=[])
    rows = [row.found(untested) for row in claims.rows().values()]  # each origin has some
    odd = dataclasses.replace(rows[0], name="odd", statement="50 % & $1 #2 a_b {c} d^2 ~ x̃ \\ ≤ 9")
    text = verdict_table.latex([*rows, odd])
    assert text.isascii()
    row = r"50 \% \& \$1 \#2 a\_b \{c\} d\^{}2 "
    row += r"\textasciitilde{} $\tilde{x}$ \textbackslash{} $\le$ 9"
    assert row in text
    begun = re.findall(r"\\begin\{(\w+)\}", text)
    assert begun == re.findall(r"\\end\{(\w+)\}", text) == ["longtable"] * len(verdict_table.TITLES)
    bare = re.sub(r"\\.", "", text)  # without what is escaped
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    body = [line for line in text.splitlines() if line.endswith(r"\\") and "caption" not in line]
    assert len(body) == len(rows) + 1 + len(verdict_table.TITLES)  # and a head each
    columns = len(verdict_table.LATEX_COLUMNS)
    assert {re.sub(r"\\.", "", line).count("&") for line in body} == {columns - 1}


def test_the_table_of_the_memory_hierarchy_is_up_to_date():
    page = memory_hierarchy.page(tidy(memory_hierarchy.EXPERIMENTS, local=False))
    assert page == memory_hierarchy.PAGE.read_text(), "run `make readme`"


def test_the_pictures_of_the_pages_are_there_and_small():
    page = verdict_table.README.read_text()
    shown = re.findall(r"docs/images/([\w.]+)", page)
    assert shown == [f"{gallery.CHOSEN[0]}.svg", "verdicts.svg"]
    small = re.findall(r'src="images/([\w.]+)"', gallery.PAGE.read_text())
    assert sorted(small) == sorted(f"{name}.svg" for name in gallery.CHOSEN)
    for name in small:
        size = (command.IMAGES / name).stat().st_size
        assert 2_000 < size < 150_000, f"{name}: {size} bytes"


def test_the_page_of_figures_is_up_to_date_and_has_all_of_them():
    assert gallery.page() == gallery.PAGE.read_text(), "run `make readme`"
    listed = re.findall(r"^\| `(\w+)` \|", gallery.PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(common.names())
    assert list(gallery.grouped())[-1] == gallery.OURS
    assert gallery.subject("fa1_fig2_left")[0] == "FlashAttention 2022"


def test_the_readmes_links_and_commands_exist():
    page = verdict_table.README.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", page):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in re.findall(r"figures/out/(\w+)\.svg", page):
        assert name in common.names(), name


def test_each_marker_is_needed_once():
    with pytest.raises(ValueError, match="exactly one"):
        verdict_table.readme_with({"verdicts": "x"}, "no markers")
    begin, end = verdict_table.MARKERS["verdicts"]
    page = f"a {begin} old {end} b"
    new = verdict_table.readme_with({"verdicts": "new"}, page)
    assert new.startswith("a ")
    assert new.endswith(" b")
    assert "old" not in new
    assert verdict_table.readme_with({"verdicts": "new"}, new) == new
    with pytest.raises(ValueError, match="exactly one"):
        verdict_table.readme_with({"verdicts": "x"}, page + begin)


def test_the_readmes_python_runs():
    snippets = re.findall(r"```python\n(.*?)```", verdict_table.README.read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        names = {}
        exec(snippet, names)
        assert names["q"].grad is not None


def test_the_readme_can_be_read_in_five_minutes():
    assert len(verdict_table.README.read_text().split()) <= 1200
