"""Speed of the host backend on one core: emulated tensor cores, fiber switches, memory checks.

    pytest tests/bench/bench_host_backend.py

Rates are in the ``extra_info`` of pytest-benchmark's record and printed at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kernels.host import HostBackend
from kernels.launch import Argument, Kernel, from_numpy

SOURCE = r"""
#include "device.cuh"

// What an attention kernel does per 16 x 16 x 64 product: fragments by ldmatrix, then mma.
extern "C" __global__ void products(Tensor1<float> out, int repeats) {
    unsigned char* const shared = shared_memory();
    const int t = threadIdx.x, lane = t % 32;
    for (int i = 0; i < 4; ++i) cp_async_16(shared + 16 * (t + i * blockDim.x), nullptr, false);
    cp_async_commit();
    cp_async_wait<0>();
    block_sync();
    float d[2][4] = {};
    const unsigned char* const row = shared + lane * 16;
    for (int i = 0; i < repeats; ++i)
        for (int k = 0; k < 4; ++k) {
            uint32 a[4], b[4];
            ldmatrix_x4(a, row + 1024 * k);
            ldmatrix_x4(b, row + 1024 * k + 512);
            mma_16816(d[0], a, {b[0], b[1]}, fp16{});
            mma_16816(d[1], a, {b[2], b[3]}, fp16{});
        }
    st_global(out.data + t, d[0][0] + d[1][0]);
}

extern "C" __global__ void switches(Tensor1<float> out, int repeats) {
    for (int i = 0; i < repeats; ++i) warp_sync();
    st_global(out.data + threadIdx.x, 0.f);
}

extern "C" __global__ void barriers(Tensor1<float> out, int repeats) {
    for (int i = 0; i < repeats; ++i) block_sync();
    st_global(out.data + threadIdx.x, 0.f);
}

extern "C" __global__ void loads(Tensor1<float> out, int repeats) {
    float* const mine = reinterpret_cast<float*>(shared_memory()) + threadIdx.x;
    st_shared(mine, 1.f);
    block_sync();
    float sum = 0;
    for (int i = 0; i < repeats; ++i) sum += ld_shared(mine);
    st_global(out.data + threadIdx.x, sum);
}
"""
THREADS = 128
# Processor time, so that other work on the machine counts less.
pytestmark = pytest.mark.benchmark(timer=time.process_time)
rates: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def report() -> Iterator[None]:
    yield
    print("\n" + "\n".join(rates))


def best_seconds(benchmark: BenchmarkFixture, entry: str, repeats: int, checks: bool, threads: int = THREADS) -> float:
    out = np.zeros(threads, np.float32)
    args: list[Argument] = [from_numpy("out", out, "w"), np.int32(repeats)]
    backend = HostBackend(checks=checks, os_threads=1)
    kernel = Kernel(SOURCE, entry, (), threads)
    backend.launch(kernel, (1, 1, 1), 8192, args)  # compile
    benchmark.pedantic(lambda: backend.launch(kernel, (1, 1, 1), 8192, args), rounds=5, warmup_rounds=1)
    return float(benchmark.stats.stats.min)


def note(benchmark: BenchmarkFixture, name: str, value: float, unit: str, checks: bool) -> None:
    benchmark.extra_info[f"{name}_{unit}"] = value
    rates.append(f"{name}, checks {'on' if checks else 'off'}: {value:.1f} {unit}")


@pytest.mark.parametrize("checks", [True, False])
def test_emulated_tensor_cores(benchmark: BenchmarkFixture, checks: bool) -> None:
    repeats = 500
    seconds = best_seconds(benchmark, "products", repeats, checks)
    flops = repeats * (THREADS // 32) * 8 * 2 * 16 * 8 * 16
    mflops = flops / seconds / 1e6
    note(benchmark, "mma fed by ldmatrix", mflops, "MFLOP/s", checks)
    assert mflops >= 300


@pytest.mark.parametrize("entry", ["switches", "barriers"])
def test_fiber_switch(benchmark: BenchmarkFixture, entry: str) -> None:
    repeats = 20_000
    seconds = best_seconds(benchmark, entry, repeats, True)
    nanoseconds = seconds / (repeats * THREADS) * 1e9
    note(benchmark, f"switch in {entry}", nanoseconds, "ns", True)
    assert nanoseconds < 100


@pytest.mark.parametrize("checks", [True, False])
def test_shared_load(benchmark: BenchmarkFixture, checks: bool) -> None:
    repeats = 20_000
    seconds = best_seconds(benchmark, "loads", repeats, checks)
    note(benchmark, "shared load", seconds / (repeats * THREADS) * 1e9, "ns", checks)
