"""compute-sanitizer's endings, with a fake one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from repro.instruments.sanitizer import FOUND, SanitizerError, check


def fake(folder: Path, says: str, code: int) -> str:
    script = folder / "compute-sanitizer"
    script.write_text(f"#!{sys.executable}\nimport sys\nprint({says!r})\nsys.exit({code})\n")
    script.chmod(0o755)
    return str(script)


def test_a_clean_run_gives_the_closing_line(tmp_path: Path) -> None:
    tool = fake(tmp_path, "3 passed\n========= ERROR SUMMARY: 0 errors", 0)
    assert check("memcheck", ["tests"], timeout_s=30, sanitizer=tool) == "ERROR SUMMARY: 0 errors"


@pytest.mark.parametrize(
    ("says", "code", "message"),
    [
        (
            "========= Invalid __global__ write of size 4\n========= ERROR SUMMARY: 1 error",
            FOUND,
            "found faults: Invalid __global__ write of size 4",
        ),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors)", 0, "found faults"),
        ("========= Error: Device not supported", 1, "does not support this device"),
        ("no tests ran", 5, "no test was selected"),
        ("E   assert 1 == 2", 1, "the tests ended with 1: E   assert 1 == 2"),
        ("3 passed", 0, "printed no summary, so nothing was checked"),
    ],
)
def test_everything_else_is_one_line_with_the_cause(tmp_path: Path, says: str, code: int, message: str) -> None:
    tool = fake(tmp_path, says, code)
    with pytest.raises(SanitizerError, match=message) as raised:
        check("memcheck", ["tests"], timeout_s=30, sanitizer=tool)
    assert "\n" not in str(raised.value)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SanitizerError, match="compute-sanitizer is not on PATH"):
        check("memcheck", ["tests"], timeout_s=1)
