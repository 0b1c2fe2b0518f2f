"""``python -m repro dev``: every tool is there, and gets its own arguments."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from repro.commands.dev import TOOLS
from tests.support.command_support import run

ROOT = Path(__file__).resolve().parents[2]
#: Started as processes of their own: on machines without typer, under torchrun, ncu or a guard.
PROCESSES = {
    "figures/__main__.py",
    "kernels/building/nvrtc_server.py",
    "kernels/prebuild.py",
    "repro/__main__.py",
    "repro/distributed/measure.py",
    "repro/gpu/run.py",
    "repro/instruments/counted.py",
    "repro/instruments/hopper_cases.py",
    "repro/instruments/hopper_guard.py",
    "repro/instruments/sanitizer.py",
    "repro/instruments/warm_up.py",
    "repro/measure.py",
}


def test_every_tool_has_a_main_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "dev", "--help")
    for name, (module, text) in TOOLS.items():
        assert callable(import_module(module).main)
        assert f"{name} " in out
        assert " ".join(text.split()[:3]) in " ".join(out.split())


def test_a_tool_reads_its_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "dev", "prebuild", "--list", "--only", "flash_backward_dq")
    assert status == 0
    assert "flash_backward_dq" in out
    with pytest.raises(SystemExit) as stop:
        run(capsys, "dev", "check", "--help")
    assert stop.value.code == 0
    assert "a source in kernels/" in capsys.readouterr().out


def test_what_is_no_process_of_its_own_is_a_tool() -> None:
    """Modules that are also programs: those that other machines or processes start, and the time
    room's, whose commands write records."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("analysis", "kernels", "repro", "figures")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r'^if __name__ == "__main__":', path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {path for path in found if "timing" not in path} == PROCESSES
