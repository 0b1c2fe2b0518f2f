"""What a user or a kernel does wrong: one line with kernel, block, warp, address, instruction."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest

from kernels.building.compile import compile_cubin
from kernels.launch import Kernel
from kernels.machine import MachineError, NotUnderstoodError, Program, load

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")

SOURCE = """
extern "C" __global__ void fill(float* x, int n, float value) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = value;
}
extern "C" __global__ void wide(float* x, int at) { *(float4*)(x + at) = make_float4(1, 2, 3, 4); }
extern "C" __global__ void spin(volatile int* x) { while (*x == 0) {} }
extern "C" __global__ void stuck(int* x) {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");
  x[threadIdx.x] = 1;
}
extern "C" __global__ void reach(float* x, int at) {
  extern __shared__ float s[];
  s[at] = 1; __syncthreads(); x[threadIdx.x] = s[at];
}
extern "C" __global__ void stop(int* x) { if (*x) asm volatile("trap;"); }
"""


@cache
def program(arch: str = "sm_80") -> Program:
    return load(compile_cubin(Kernel(SOURCE, "fill", (), 32), arch).cubin)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_counts(arch: str) -> None:
    x = np.zeros(100, np.float32)
    counts = program(arch).launch("fill", (2, 1, 1), 64, args=[x, np.int32(100), np.float32(3)])
    assert (x == 3).all()
    traffic = counts.traffic[0, "write"]
    assert (traffic.nbytes, traffic.sectors, traffic.requests) == (400, 13, 4)
    assert list(counts.traffic) == [(0, "write")]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("entry", "args", "said"),
    [
        ("fill", [np.zeros(90, np.float32), np.int32(100), np.float32(1)], "outside of every"),
        ("wide", [np.zeros(64, np.float32), np.int32(1)], "misaligned address"),
        ("reach", [np.zeros(64, np.float32), np.int32(4000)], "shared address"),
        ("stuck", [np.zeros(64, np.int32)], "waits for ever"),
        ("stop", [np.ones(1, np.int32)], "stopped itself"),
    ],
)
def test_fault_names_its_place(arch: str, entry: str, args: list[object], said: str) -> None:
    threads = 128 if entry == "fill" else 32
    with pytest.raises(MachineError, match=said) as caught:
        program(arch).launch(entry, (1, 1, 1), threads, 256, args)
    assert re.match(rf"{entry}: block 0, warp \d, 0x[0-9a-f]+ \S+", str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_loop_without_end() -> None:
    with pytest.raises(MachineError, match="no end in sight"):
        program().launch("spin", (1, 1, 1), 32, args=[np.zeros(1, np.int32)], step_limit=10_000)


def test_bad_arguments() -> None:
    x = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="no entry 'full': there are fill, reach"):
        program().launch("full", (1, 1, 1), 32)
    with pytest.raises(ValueError, match=r"takes 3 arguments of .* 1 are given"):
        program().launch("fill", (1, 1, 1), 32, args=[x])
    with pytest.raises(ValueError, match=r"argument 1 has 8 bytes .int64., the parameter has 4"):
        program().launch("fill", (1, 1, 1), 32, args=[x, np.int64(8), np.float32(1)])
    with pytest.raises(TypeError, match="argument 2 is a float"):
        program().launch("fill", (1, 1, 1), 32, args=[x, np.int32(8), 1.0])
    with pytest.raises(ValueError, match=r"2048 threads|threads; 1 to 1024"):
        program().launch("fill", (1, 1, 1), 2048, args=[x, np.int32(8), np.float32(1)])
    x.flags.writeable = False
    with pytest.raises(MachineError, match="read-only"):
        program().launch("fill", (1, 1, 1), 32, args=[x, np.int32(8), np.float32(1)])
    with pytest.raises(ValueError, match="no ELF file"):
        load(b"something else")


def test_an_unknown_instruction_is_named() -> None:
    source = """extern "C" __global__ void texture(unsigned* x, unsigned long long t) {
      unsigned r; asm volatile("suld.b.1d.b32.trap %0, [%1, {%2}];" : "=r"(r) : "l"(t), "r"(0));
      *x = r; }"""
    cubin = compile_cubin(Kernel(source, "texture", (), 32), "sm_80").cubin
    with pytest.raises(NotUnderstoodError, match=r"not understood at 0x[0-9a-f]+: SULD"):
        load(cubin).launch("texture", (1, 1, 1), 32, args=[np.zeros(1, np.uint32), np.uint64(0)])
