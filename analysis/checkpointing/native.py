"""fill.c, compiled, and the structure it is given.

Where there is no compiler `library` returns None and optimal.py fills its table with NumPy: same
numbers, more seconds.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from analysis import native

SOURCE = Path(__file__).with_name("fill.c")


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


def library(real: str) -> ctypes.CDLL | None:
    """`fill` for real in {"float", "double"}, or None where it cannot be compiled."""
    return native.library(SOURCE, f"REAL={real}")
