"""Counts cache misses of ``kernels/beside/gemm_cpu.c`` with valgrind's cachegrind.

cachegrind simulates two levels of LRU caches of any size for a compiled program and reports misses
by function. Where it is missing, callers fall back on ``analysis.cache_model`` and say so.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from analysis.cache_model import Cache, Misses
from kernels.launch import KERNELS_DIR

SOURCE = KERNELS_DIR / "beside" / "gemm_cpu.c"


def missing() -> str | None:
    """Why misses cannot be counted here, or None."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed (Debian: apt-get install valgrind)"
    if compiler() is None:
        return "no C compiler found (tried cc, gcc, clang)"
    return None


def compiler() -> str | None:
    """The system's C compiler."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def count_misses(n: int, block: int, first: Cache, last: Cache) -> dict[str, Misses]:
    """Data misses of ``naive_gemm`` and ``tiled_gemm`` in caches of these sizes.

    Raises RuntimeError with one line when a tool is missing or fails.
    """
    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory() as folder:
        program, report = Path(folder) / "gemm_cpu", Path(folder) / "report"
        build(program)
        run(
            [
                "valgrind",
                "--tool=cachegrind",
                "--cache-sim=yes",
                "--I1=32768,8,64",  # instructions: no part of this, but it must be stated
                f"--D1={first.nbytes},{first.ways},{first.line_bytes}",
                f"--LL={last.nbytes},{last.ways},{last.line_bytes}",
                f"--cachegrind-out-file={report}",
                str(program),
                str(n),
                str(block),
            ]
        )
        return parse(report.read_text(encoding="utf-8"))


def build(program: Path) -> None:
    """Compile the C source; RuntimeError with one line where that fails."""
    # -O1: loads and stores as written, no vectors that would change the references
    run([str(compiler()), "-O1", "-fno-tree-vectorize", "-o", str(program), str(SOURCE)])


def run(command: list[str]) -> str:
    """What a command writes to its second output; RuntimeError with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=300, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"{Path(command[0]).name} failed ({done.returncode}): {lines[-1]}")
    return done.stderr


def parse(report: str) -> dict[str, Misses]:
    """Data references and misses by function (names ending in ``_gemm``) of a cachegrind file."""
    events: list[str] = []
    totals: dict[str, dict[str, int]] = {}
    function = ""
    for line in report.splitlines():
        if line.startswith("events:"):
            events = line.split()[1:]
        elif line.startswith("fn="):
            function = line[3:]
        elif line[:1].isdigit() and function.endswith("_gemm"):
            counts = [int(word) for word in line.split()[1:]]
            held = totals.setdefault(function, dict.fromkeys(events, 0))
            for event, count in zip(events, counts, strict=False):
                held[event] += count
    if not totals:
        raise RuntimeError("the cachegrind report names no *_gemm function")
    return {name: Misses(t["Dr"] + t["Dw"], t["D1mr"] + t["D1mw"], t["DLmr"] + t["DLmw"]) for name, t in totals.items()}
