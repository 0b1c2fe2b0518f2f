"""``python -m repro dev``: every tool is there, and gets its own arguments."""

from __future__ import annotations

from importlib import import_module

import pytest

from repro.commands.dev import TOOLS
from tests.support.command_support import run


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
