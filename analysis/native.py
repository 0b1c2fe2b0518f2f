"""Compiles a C source of this package with the system's compiler, once, into the cache.

Where there is no compiler the result is None, and the caller says what it does instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from analysis.files import cache_dir, find_library, keep_library, private, workshop

NATIVE = "-march=native"
FLAGS = ("-O3", NATIVE, "-fno-math-errno", "-std=c99", "-shared", "-fPIC")


@cache
def library(source: Path, *macros: str, flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL | None:
    """The shared library of one C file; None without a compiler or a safe place to keep it.

    macros: definitions as the compiler's command line has them, e.g. "REAL=float".
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    command = [os.path.abspath(compiler), *flags, *(f"-D{macro}" for macro in macros)]
    # -march=native: the library belongs to this processor, so its flags are part of the key.
    text = source.read_text(encoding="utf-8") + " ".join(command) + _processor()
    try:
        folder = private(cache_dir() / "native")
        place = folder / f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        kept = find_library(place)
        if kept is None:
            with workshop(folder) as draft:
                # Copied and named without its folder: any character may be in a path.
                shutil.copy(source, draft / "source.c")
                try:
                    _compile(command, draft)
                except subprocess.CalledProcessError:  # some compilers do not know their machine
                    _compile([word for word in command if word != NATIVE], draft)
                kept = keep_library(draft / "built.so", place)
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.CalledProcessError):
        return None


def _compile(command: Sequence[str], folder: Path) -> None:
    subprocess.run(
        [*command, "source.c", "-o", "built.so"],
        cwd=folder,
        check=True,
        capture_output=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")
