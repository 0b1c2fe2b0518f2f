"""Cache misses of ``kernels/beside/gemm_cpu.c`` by the processor's counters (Linux's perf).

Many virtual machines hide the counters. Then there is no number, and the caller says why.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from repro.instruments import cachegrind

EVENT = "L1-dcache-load-misses"


def missing() -> str | None:
    """Why misses cannot be counted here, or None; that the event is counted is only seen by
    trying."""
    if shutil.which("perf") is None:
        return "perf is not installed (Debian: apt-get install linux-perf)"
    if cachegrind.compiler() is None:
        return "no C compiler found (tried cc, gcc, clang)"
    return None


def count_misses(n: int, block: int, form: str) -> int:
    """First-level load misses of the program in user mode, which fills its matrices and runs one
    form, "naive" or "tiled".

    Raises RuntimeError with one line when a tool is missing or the event is not counted.
    """
    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "gemm_cpu"
        cachegrind.build(program)
        command = ["perf", "stat", "-x", ",", "-e", f"{EVENT}:u", str(program), str(n), str(block)]
        return parse(cachegrind.run([*command, form]))


def parse(report: str) -> int:
    """The count in perf's comma-separated report; RuntimeError where it has none."""
    for line in report.splitlines():
        fields = line.split(",")
        if len(fields) > 2 and fields[2].startswith(EVENT):
            if fields[0].isdigit():
                return int(fields[0])
            raise RuntimeError(f"perf: {EVENT} is {fields[0].strip('<>')} on this machine")
    lines = report.strip().splitlines() or ["no message"]
    raise RuntimeError(f"perf reports no {EVENT}: {lines[-1]}")
