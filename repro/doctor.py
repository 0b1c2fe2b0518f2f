"""What this machine can do for the package, and the reason for everything that it cannot."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from repro import machine


@dataclass(frozen=True)
class Finding:
    """One line of the report. Without ``needed`` a missing thing only takes features away."""

    what: str
    ok: bool
    detail: str
    needed: bool = False


def findings() -> Iterator[Finding]:
    """All checks, cheap ones first; none raises."""
    yield Finding(
        "Python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer)", True
    )
    yield Finding("CPU", True, machine.cpu())
    yield compiler()
    for package, use in (
        ("torch", "operator, CPU experiments"),
        ("numpy", "theory"),
        ("seaborn", "figures"),
        ("tabulate", "verdict table"),
    ):
        found = machine.version(package)
        yield Finding(package, found is not None, f"{found or 'not installed'}: {use}", True)
    yield check("NVRTC", nvrtc, "compile tests without a driver")
    card = machine.gpu()
    yield Finding(
        "NVIDIA GPU", card is not None,
        f"{card.name}, driver {card.driver}" if card else
        "none found through NVML: kernels run on the host backend, GPU tests skip",
    )  # fmt: skip
    cupy = machine.cupy_version()
    yield Finding("CuPy", cupy is not None, cupy or "not installed: only CUDA tensors need it "
                  '(pip install -e ".[cuda12]" or ".[cuda13]")')  # fmt: skip
    ncu = shutil.which("ncu")
    yield Finding("Nsight Compute", ncu is not None,
                  "found" if ncu else "no ncu on PATH: no hardware traffic counters")  # fmt: skip


def compiler() -> Finding:
    """The C++ compiler that the host backend uses: $CXX, c++, g++ or clang++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next((name for name in names if shutil.which(name)), None)
    if found is None:
        return Finding("C++ compiler", False, f"none of {', '.join(names)} on PATH", True)
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20)
        first = (done.stdout or done.stderr).splitlines()[:1]
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("C++ compiler", False, f"{found} does not run: {error}", True)
    return Finding("C++ compiler", done.returncode == 0, " ".join(first) or found, True)


def check(what: str, probe: Callable[[], str], use: str) -> Finding:
    """A probe's answer, or its error in one line."""
    try:
        return Finding(what, True, f"{probe()}: {use}")
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        return Finding(what, False, f"{first}: no {use}")


def nvrtc() -> str:
    """Version of the runtime compiler's wheel."""
    from cuda.bindings import nvrtc as library

    status, major, minor = library.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"nvrtcVersion returned {status}")
    return f"{major}.{minor}"


def report() -> tuple[str, bool]:
    """The report as text, and whether everything needed is there."""
    found = list(findings())
    width = max(len(f.what) for f in found)
    marks = {True: "ok", False: "--"}
    lines = [
        f"{'MISSING' if f.needed and not f.ok else marks[f.ok]:8}{f.what:{width}}  {f.detail}"
        for f in found
    ]
    return "\n".join(lines), all(f.ok for f in found if f.needed)
