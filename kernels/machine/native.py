"""The compiled executor: layouts shared with ``native/state.hpp``, and loading it."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from kernels.building.cache import read_all
from kernels.host import compiler

NATIVE_DIR = Path(__file__).resolve().parent / "native"
FLAGS = (
    *("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-O3"),
    # A multiplication and an addition stay two operations unless the code says fma.
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"),
)

OPERAND = np.dtype(
    [(name, np.uint8) for name in ("kind", "reg", "flags", "part", "ureg", "bank", "scale", "wide")]
    + [("value", np.int64)]
)
INSTRUCTION = np.dtype(
    [
        ("op", np.uint16),
        ("guard", np.uint8),
        ("guard_flags", np.uint8),
        ("address", np.uint32),
        ("target", np.int32),
        ("index", np.uint32),
        ("mod", np.uint8, 8),
        ("o", OPERAND, 10),
    ]
)
RANGE = np.dtype(
    [("begin", np.uint64), ("end", np.uint64), ("host", np.uint64)]
    + [(name, np.int32) for name in ("argument", "slot", "writable", "unused")]
)
TALLY = np.dtype([("requests", np.uint64), ("sectors", np.uint64), ("bytes", np.uint64), ("misses", np.uint64)])
BANKS = 8


class LaunchArguments(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_void_p),
        ("code_count", ctypes.c_int64),
        ("banks", ctypes.c_void_p * BANKS),
        ("bank_bytes", ctypes.c_int64 * BANKS),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_int64),
        ("tallies", ctypes.c_void_p),
        ("slot_count", ctypes.c_int64),
        ("executed", ctypes.c_void_p),
        ("lanes", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("first_block", ctypes.c_int64),
        ("block_count", ctypes.c_int64),
        ("shared_bytes", ctypes.c_int64),
        ("shared_base", ctypes.c_uint32),
        ("architecture", ctypes.c_uint32),
        ("local_bytes", ctypes.c_int64),
        ("workers", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("exact_products", ctypes.c_int32),
        ("mufu", ctypes.c_int32),
        ("adversarial", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("step_limit", ctypes.c_uint64),
        ("stop", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("dynamic_shared", ctypes.c_int64),
        ("map_base", ctypes.c_uint64),
    )


class Failure(ctypes.Structure):
    _fields_ = (
        ("text", ctypes.c_char * 512),
        ("block", ctypes.c_int64),
        ("warp", ctypes.c_int64),
        ("address", ctypes.c_int64),
    )


@cache
def library() -> ctypes.CDLL:
    """The executor, compiled once. HostCompileError without a C++ compiler."""
    sources = sorted(NATIVE_DIR.glob("*.*pp"))
    path = compiler.build('#include "machine/native/machine.cpp"\n', FLAGS, "machine", read_all(sources))
    found = compiler.load(path)
    found.machine_operation.restype = ctypes.c_char_p
    sizes = [INSTRUCTION.itemsize, RANGE.itemsize, *map(ctypes.sizeof, (LaunchArguments, Failure))]
    there = [found.machine_sizes(k) for k in range(len(sizes))]
    if sizes != there:
        raise RuntimeError(f"layouts differ between Python and C++: {sizes} and {there}")
    return found


@cache
def operations() -> dict[str, int]:
    """Numbers of the operations."""
    found = library()
    count = found.machine_operation_count()
    return {found.machine_operation(k).decode(): k for k in range(count)}
