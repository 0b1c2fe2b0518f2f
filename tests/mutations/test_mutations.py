"""The list of mutations can be run: its texts are in the sources, its tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from run import ROOT, Mutation, mutations, place

LEAST = 150
"""Of the list that can be made today; ``make mutations`` names those whose text is gone."""


def test_enough_of_the_list_is_in_the_sources() -> None:
    assert sum(place(ROOT, each) is not None for each in mutations()) >= LEAST


def test_the_tests_that_should_notice_exist() -> None:
    names = {entry.partition(" -k ")[0] for each in mutations() for entry in each.tests}
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert names <= files, sorted(names - files)


def test_a_file_that_has_moved_is_found_by_its_text(tmp_path: Path) -> None:
    moved = tmp_path / "kernels" / "new.py"
    moved.parent.mkdir()
    moved.write_text("a = 1 + 1\n", encoding="utf-8")
    for old, found in (("1 + 1", moved), ("2 + 2", None), ("1", None)):  # here, gone, twice
        assert place(tmp_path, Mutation("x", "kernels/old.py", old, "", ())) == found


def test_what_changes_nothing_or_is_listed_twice_is_named(tmp_path: Path) -> None:
    entry = '[[mutation]]\nname = "x"\nfile = "a.py"\nold = "1"\nnew = "{}"\ntests = []\n'
    listed = tmp_path / "list.toml"
    for text, message in ((entry.format(1), "x changes nothing"), (2 * entry.format(2), "twice")):
        listed.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            mutations(listed)
