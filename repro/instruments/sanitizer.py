"""compute-sanitizer over the GPU tests marked ``sanitize``: memory errors and data races.

    python -m repro.instruments.sanitizer [--tool memcheck --tool racecheck]

The host backend finds the same faults on the CPU; this is the second opinion, on real hardware.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from repro import cli
from repro.measuring import processes
from repro.measuring.progress import say

TOOLS = ("memcheck", "racecheck")
#: What compute-sanitizer exits with when it found something (its default is 0).
FOUND = 86


class SanitizerError(RuntimeError):
    """The sanitizer found faults or could not run; the message is one line."""


def command(sanitizer: str, tool: str, tests: Sequence[str]) -> list[str]:
    """The call that runs ``tests`` under one tool and fails when it finds anything."""
    return [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND),
        "--target-processes",
        "all",
        "--print-limit",
        "5",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *tests,
    ]


def check(tool: str, tests: Sequence[str], *, timeout_s: float, sanitizer: str | None = None) -> str:
    """Run one tool; returns its closing line. Raises SanitizerError for a finding or a refusal."""
    program = sanitizer or shutil.which("compute-sanitizer")
    if program is None:
        raise SanitizerError("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    try:
        done = processes.run(command(program, tool, tests), timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        raise SanitizerError(f"{tool} did not finish within {timeout_s:g} s") from None
    output = done.stdout + done.stderr
    reports = [line for line in output.splitlines() if line.startswith("=========")]
    if "Device not supported" in output:
        raise SanitizerError("compute-sanitizer does not support this device or runtime")
    closing = next((r for r in reversed(reports) if "SUMMARY" in r), None)
    if done.returncode == FOUND or (closing and not re.search(r"\b0 (errors|hazards)", closing)):
        findings = [r.strip("= ") for r in reports if re.search(r"Invalid|[Hh]azard|Error", r)]
        first = findings[0] if findings else "no detail"
        raise SanitizerError(f"{tool} found faults: {first}")
    if done.returncode == 5:  # pytest: no test was selected
        raise SanitizerError(f"{tool}: no test was selected by {' '.join(tests)}")
    if done.returncode:
        last = (output.strip() or "no output").splitlines()[-1]
        raise SanitizerError(f"{tool}: the tests ended with {done.returncode}: {last}")
    if closing is None:
        raise SanitizerError(f"{tool} printed no summary, so nothing was checked")
    return closing.strip("= ")


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the kernels with compute-sanitizer on small shapes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all of them")
    parser.add_argument("--timeout-s", type=float, default=55.0, help="seconds for one tool")
    given = parser.parse_args(arguments)
    faults = []
    for name in given.tool or TOOLS:
        try:
            say(f"{name}: {check(name, ['tests/gpu', '-m', 'sanitize'], timeout_s=given.timeout_s)}")
        except SanitizerError as error:
            say(str(error))
            faults.append(name)
    if faults:
        raise SanitizerError(f"not clean: {', '.join(faults)}")


if __name__ == "__main__":
    sys.exit(cli.program(main))
