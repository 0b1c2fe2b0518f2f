"""Runs command lines in this process, and test programs that need a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.__main__ import app

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command line."""
    before = sys.argv
    sys.argv = ["repro", *arguments]
    try:
        status = cli.run(app, "repro")
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return status, out, err


def program(name: str, **environment: str) -> Any:
    """What a program beside this file writes as the last line of its output, in JSON."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / name)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
