"""Runs a command line in this process and gives what a shell would see."""

from __future__ import annotations

import sys

import pytest

from repro import cli
from repro.__main__ import app


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
