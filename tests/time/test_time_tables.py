"""Tables of the pages that follow from the model of time, and the commands that write them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernels.timing import __main__ as records_command
from repro.timing import tables

SLOW = {"tiles", "rounds", "choice"}
"""Other tests take samples of those that follow machine code, and share the last one's seconds."""


@pytest.mark.parametrize("name", sorted(tables.TABLES.keys() - SLOW))
def test_the_page_has_the_table(name: str) -> None:
    block = tables.block(name)
    page = block.path.read_text(encoding="utf-8")
    assert block.put(tables.TABLES[name][1](), page) == page, f"python -m repro.timing tables {name}"


def test_unknown_tables_and_records_are_named() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "repro.timing", "tables", "nothing"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 1
    assert "no table nothing; there are a100" in told.stderr
    with pytest.raises(SystemExit):
        records_command.main(["nothing"])
