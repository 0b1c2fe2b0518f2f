"""What a launch counts: sectors by array and field, what L1 keeps, local memory; cubins in libraries."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kernels.building.compile import compile_cubin
from kernels.launch import Kernel
from kernels.machine import Program, Struct, Traffic, load
from kernels.machine.fatbin import cubins

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")

SOURCE = """
struct Pair { const float* x; int n; float* y; };
extern "C" __global__ void shared_row(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x % 32];
}
extern "C" __global__ void volatile_row(const volatile float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x % 32];
}
extern "C" __global__ void by_struct(Pair p) {
  if (threadIdx.x < p.n) p.y[threadIdx.x] = p.x[threadIdx.x];
}
extern "C" __global__ void local_array(const int* at, float* y) {
  float kept[64];
  for (int k = 0; k < 64; k++) kept[k] = float(k);
  y[threadIdx.x] = kept[at[threadIdx.x]];
}
"""
ARCHITECTURES = pytest.mark.parametrize("arch", ["sm_80", "sm_90"])


@cache
def program(arch: str) -> Program:
    return load(compile_cubin(Kernel(SOURCE, "shared_row", (), 32), arch).cubin)


@ARCHITECTURES
def test_what_a_block_reads_again_stays_in_l1_unless_it_is_volatile(arch: str) -> None:
    x, y = np.arange(32, dtype=np.float32), np.zeros(128, np.float32)
    counts = program(arch).launch("shared_row", (3, 1, 1), 128, args=[x, y])
    assert counts.traffic[0, "read"] == Traffic(requests=12, sectors=48, nbytes=1536, misses=12)
    assert counts.traffic[1, "write"] == Traffic(requests=12, sectors=48, nbytes=1536, misses=48)
    counts = program(arch).launch("volatile_row", (3, 1, 1), 128, args=[x, y])
    assert counts.traffic[0, "read"].misses == 48


@ARCHITECTURES
def test_arrays_in_a_struct_are_told_apart_by_name(arch: str) -> None:
    x, y = np.arange(40, dtype=np.float32), np.zeros(40, np.float32)
    counts = program(arch).launch("by_struct", (1, 1, 1), 64, args=[Struct({"x": x, "n": np.int32(40), "y": y})])
    assert np.array_equal(x, y)
    assert counts.fields == {(0, "x", "read"): Traffic(2, 5, 160, 5), (0, "y", "write"): Traffic(2, 5, 160, 5)}
    assert counts.traffic == {(0, "read"): Traffic(2, 5, 160, 5), (0, "write"): Traffic(2, 5, 160, 5)}
    numbered = program(arch).launch("by_struct", (1, 1, 1), 64, args=[Struct((x, np.int32(40), y))])
    assert {field for _, field, _ in numbered.fields} == {"0", "2"}


@ARCHITECTURES
def test_local_memory_goes_on_to_l2_when_it_is_written(arch: str) -> None:
    y = np.zeros(64, np.float32)
    at = np.arange(64, dtype=np.int32) % 16
    counts = program(arch).launch("local_array", (1, 1, 1), 64, args=[at, y])
    assert np.array_equal(y, at)
    assert counts.local["write"].sectors == counts.local["write"].misses == 2 * 64 * 4
    assert counts.local["read"].misses == 0
    assert counts.local["read"].sectors == 64


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary of (architecture, flags, content)."""
    body = b""
    for architecture, flags, content in entries:
        head = struct.pack("<HHIQIIHHI", 2, 1, 64, len(content), len(content) if flags else 0, 0, 0, 1, architecture)
        body += head + struct.pack("<IIQQQ", 0, 0, flags, 0, 4096 if flags else 0) + content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_cubins_of_a_library(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    one, two = b"first" * 8, b"second" * 4
    library.write_bytes(b"\0" * 40 + container((80, 0, one), (90, 0, two)) + b"\0" * 8 + container((80, 0, two)))
    assert list(cubins(library, 80)) == [one, two]
    assert list(cubins(library, 90)) == [two]
    assert list(cubins(library, 86)) == []


def test_libraries_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no library at"):
        list(cubins(tmp_path / "none.so", 80))
    library = tmp_path / "lib.so"
    library.write_bytes(container((80, 0x2011, b"x" * 8)))
    with pytest.raises(ValueError, match="otherwise than by Zstandard"):
        list(cubins(library, 80))
    library.write_bytes(container((80, 0x8011, b"x" * 8)))
    with pytest.raises(ValueError, match="does not decompress"):
        list(cubins(library, 80))
