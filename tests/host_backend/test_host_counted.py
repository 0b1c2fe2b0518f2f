"""Pointers that count (``counted.cuh``): an ordinary kernel's words, on the host and by NVRTC."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.host import HostBackend, KernelError
from kernels.launch import Kernel, from_numpy
from tests.support.host_support import one_kernel

WORDS = r"""
#include "counted.cuh"
@ENTRY@
ENTRY(moves) {
    Shared<float> s = dynamic_shared<float>(64);
    const int t = threadIdx.x;
    s[t] = x[t];                    // global to shared
    __syncthreads();
    Shared<float> end = s + 32;
    y[t] = *(end - (t + 1));        // shared to global, backwards
    y[32 + t] = s[31 - t] = x[t];
    Global<float> z = y;
    z += 64;
    z[t] = float(&y[64 + t] - y) + (z == y + 64) + (y != z) + (y < z);
}
ENTRY(arithmetic) {
    const int t = threadIdx.x;
    y[t] = x[t];
    y[t] += 1.f;
    y[t] *= 2.f;
    y[t] -= 1.f;
    y[t] /= 2.f;
}
ENTRY(wide) {
    if (threadIdx.x < 8) {
        const Vec<float, 4> four = as<const Vec<float, 4>>(x)[threadIdx.x];
        as<Vec<float, 4>>(y)[threadIdx.x] = four;
    }
}
ENTRY(lanes) {
    const unsigned all = ~0u;
    const int t = threadIdx.x;
    float v = __ldg(x + t);
    for (int step = 16; step; step /= 2) v += __shfl_down_sync(all, v, step);
    v = __shfl_sync(all, v, 0);
    __syncwarp();
    y[t] = __shfl_xor_sync(all, v + t, 1) + __expf(0.f) + rsqrtf(4.f) + (INFINITY > 1e38f);
}
ENTRY(adds) { atomicAdd(&y[0], x[threadIdx.x]); }
ENTRY(outside) {
    if (threadIdx.x == 3)
        y[n] = 1.f;  // the fault
}
"""
SOURCE, ENTRIES = one_kernel(WORDS, "words", "Global<const float> x, Global<float> y, int n")
X = np.arange(32, dtype=np.float32)


def run(entry: str, size: int = 32, access: str = "w", n: int = 0) -> tuple[HostBackend, np.ndarray]:
    backend, y = HostBackend(), np.zeros(size, np.float32)
    args = [from_numpy("x", X, "r"), from_numpy("y", y, access), np.int32(n), np.int32(ENTRIES.index(entry))]
    backend.launch(Kernel(SOURCE, "words", (), 32), (1, 1, 1), 1024, args)
    return backend, y


def test_elements_move_and_pointers_count() -> None:
    backend, y = run("moves", 96)
    np.testing.assert_array_equal(y[:32], X[::-1])
    np.testing.assert_array_equal(y[32:64], X)
    np.testing.assert_array_equal(y[64:], 64 + X + 3)
    assert backend.traffic["words"] == {("x", "read"): 2 * 128, ("y", "write"): 3 * 128}
    assert backend.shared_traffic["words"] == {"read": 128, "write": 256}


def test_an_assignment_with_an_operator_reads_and_writes() -> None:
    backend, y = run("arithmetic", access="rw")
    np.testing.assert_array_equal(y, ((X + 1) * 2 - 1) / 2)
    assert backend.traffic["words"]["y", "read"] == 4 * 128
    assert backend.traffic["words"]["y", "write"] == 5 * 128


def test_wide_elements_are_one_access() -> None:
    backend, y = run("wide")
    np.testing.assert_array_equal(y, X)
    assert backend.traffic["words"] == {("x", "read"): 128, ("y", "write"): 128}


def test_lanes_exchange() -> None:
    _, y = run("lanes")
    np.testing.assert_allclose(y, X.sum() + (np.arange(32) ^ 1) + 1 + 0.5 + 1)


def test_atomic_additions_are_counted_as_such() -> None:
    backend, y = run("adds", 1, "atomic")
    assert y[0] == X.sum()
    assert backend.traffic["words"] == {("x", "read"): 128, ("y", "atomic"): 128}


def test_a_fault_names_the_line_of_the_index() -> None:
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if "the fault" in text)
    with pytest.raises(KernelError, match=rf"words\.cu:{line} ") as caught:
        run("outside", access="rw", n=1000)
    assert (caught.value.kind, caught.value.thread) == ("out of bounds", 3)


def test_the_same_source_compiles_for_a_gpu() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")
    from kernels.building.compile import compile_cubin

    facts = compile_cubin(Kernel(SOURCE, "words", (), 32), "sm_80")
    assert facts.spill_bytes == 0
