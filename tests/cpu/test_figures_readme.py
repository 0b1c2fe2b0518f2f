"""The README says what the committed records say."""

import re

import pytest

from figures import __main__ as command
from figures import memory_hierarchy, verdict_table
from repro.experiments import tidy

ROOT = verdict_table.README.parent


def test_the_generated_tables_are_up_to_date():
    page, rows = verdict_table.README.read_text(), verdict_table.collect(local=False)
    blocks = verdict_table.blocks(rows)
    assert verdict_table.readme_with(blocks, page) == page, "run `make readme`"
    assert verdict_table.claims_page(rows) == verdict_table.CLAIMS.read_text(), "run `make readme`"


def test_the_table_of_the_memory_hierarchy_is_up_to_date():
    page = memory_hierarchy.page(tidy(memory_hierarchy.EXPERIMENTS, local=False))
    assert page == memory_hierarchy.PAGE.read_text(), "run `make readme`"


def test_the_readmes_pictures_are_there_and_small():
    page = verdict_table.README.read_text()
    shown = re.findall(r"docs/images/([\w.]+)", page)
    assert sorted(set(shown)) == sorted(f"{name}.svg" for name in command.IN_README)
    for name in shown:
        size = (command.IMAGES / name).stat().st_size
        assert 2_000 < size < 150_000, f"{name}: {size} bytes"


def test_the_readmes_links_and_commands_exist():
    page = verdict_table.README.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", page):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in re.findall(r"figures/out/(\w+)\.svg", page):
        assert (ROOT / "figures" / f"{name}.py").exists(), name


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
