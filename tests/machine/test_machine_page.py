"""The page of machine code is what the decoder knows, and the command says what a file holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kernels.building.compile import compile_cubin
from kernels.launch import Kernel
from kernels.machine import page
from repro import cli
from repro.__main__ import app


def test_the_table_is_what_the_decoder_knows() -> None:
    text = page.BLOCK.path.read_text()
    assert text == page.BLOCK.put(page.table(), text)


def test_what_a_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")
    source = 'extern "C" __global__ void one(int* x, double y) {\n *x = (int)y; }\n'
    file = tmp_path / "one.cubin"
    file.write_bytes(compile_cubin(Kernel(source, "one", (), 32), "sm_80").cubin)
    monkeypatch.setattr(sys, "argv", ["repro", "cubin", str(file), "--json"])
    assert cli.run(app) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["entry"], found["parameters_bytes"]) == ("one", [8, 8])
    assert found["instructions"]["F2I"] == 1
    assert not found["not_understood"]
    monkeypatch.setattr(sys, "argv", ["repro", "cubin", str(file), "--entry", "two"])
    assert cli.run(app) == 1
    assert "no entry 'two': there are one" in capsys.readouterr().err
