"""Commands start quickly because they import little: judged by modules, not by a clock."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

import repro
from analysis.hardware import H200
from repro.__main__ import COMMANDS
from repro.commands import completion, gpus
from repro.prediction import predict
from tests.support.command_support import run

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "cupy", "pandas", "sympy", "scipy", "matplotlib", "seaborn")
PROGRAM = """
import json, sys
sys.argv = ["repro", *json.loads(sys.argv[1])]
from repro import cli
from repro.__main__ import app
status = cli.run(app, "repro")
print()
print(json.dumps([status, sorted(name for name in json.loads(sys.stdin.read())
                                 if name in sys.modules)]))
"""


def imported(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    """Which of the modules a command line has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    status, found = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    return list(found)


def test_predict_needs_no_framework_and_no_data_frame() -> None:
    """And so the package itself does not, of which the command is a user."""
    assert imported(["predict", "-n", "1k", "-a", "all", "--pass", "forward"], HEAVY) == []


def test_the_package_is_a_library() -> None:
    shape = repro.AttentionShape(1, 16, 4096, 4096, 128, dtype="bf16")
    found = repro.predict("auto", shape, "forward", "h200")
    assert isinstance(found, repro.Prediction)
    assert found == predict("auto", shape, "forward", H200)
    assert (found.algorithm, found.tile) == ("flash-sm90", repro.Tile(128, 128))
    assert repro.GPUS["H200"] is repro.gpu_named("nvidia h200")
    assert repro.__version__.count(".") == 2
    assert set(repro.__all__) <= set(dir(repro))
    for name in repro.__all__:
        assert getattr(repro, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'predictions'"):
        repro.predictions  # noqa: B018


def test_values_are_completed_also_within_a_list() -> None:
    complete = completion.of(("fp16", "bf16", "fp32", "all"))
    assert complete("fp") == ["fp16", "fp32"]
    assert complete("bf16,fp3") == ["bf16,fp32"]
    assert complete("x") == []
    assert {"L40S", "MI300X"} <= set(completion.of(gpus.names)(""))
    assert completion.of(gpus.names)("H200,l4") == ["H200,L40S", "H200,L4"]


def test_help_imports_no_command_at_all() -> None:
    heavy = (*HEAVY, "numpy", "rich", "repro.experiments", "repro.prediction", "analysis.hardware")
    assert imported(["--help"], heavy) == []
    assert imported(["--version"], heavy) == []


def test_the_list_of_commands_says_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    _, listed, _ = run(capsys, "--help")
    for name, (module, function, summary) in COMMANDS.items():
        command = getattr(import_module(f"repro.commands.{module}"), function)
        said = command.info.help if isinstance(command, typer.Typer) else command.__doc__
        text = " ".join((said or "").split("\n\n")[0].split())
        assert text == summary
        _, out, _ = run(capsys, name, "--help")
        assert summary in " ".join(out.split())
        assert name in listed
    status, _, err = run(capsys, "predicts")
    assert status == 2
    assert "predicts" in err
