"""Compiles fill.c with the system's C compiler, once, into the cache.

Where there is no compiler `library` returns None and optimal.py fills its table with NumPy: same
numbers, more seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from analysis.files import cache_dir, find_library, keep_library, private, workshop

SOURCE = Path(__file__).with_name("fill.c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c99", "-shared", "-fPIC")


class Table(ctypes.Structure):
    """The argument of `fill`, field by field as in fill.c."""

    _fields_ = [
        ("length", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("width", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("index", "activation", "whole", "own_need")),
        *((name, ctypes.c_void_p) for name in ("saving", "running", "held", "pending", "prefix")),
        ("unit", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
    ]


@cache
def library(real: str) -> ctypes.CDLL | None:
    """`fill` for real in {"float", "double"}, or None where it cannot be compiled."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    command = [compiler, *FLAGS, f"-DREAL={real}"]
    # -march=native: the object belongs to this processor, so its flags are part of the key.
    text = SOURCE.read_text(encoding="utf-8") + " ".join(command) + _processor()
    try:
        folder = private(cache_dir() / "planner")
        place = folder / f"fill-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        kept = find_library(place)
        if kept is None:
            with workshop(folder) as draft:
                built = draft / "fill.so"
                subprocess.run(
                    [*command, str(SOURCE), "-o", str(built)], check=True, capture_output=True,
                    env={**os.environ, "TMPDIR": str(draft)},
                )  # fmt: skip
                kept = keep_library(built, place)
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")
