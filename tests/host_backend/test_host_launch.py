"""Launching on the host: arguments, views, counters, scratch memory, compiler and cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.host import HostBackend, HostCompileError, KernelError
from kernels.host.compiler import find_compiler, runtime_library
from kernels.launch import Array, Backend, Kernel, encode, from_numpy

SOURCE = r"""
#include "device.cuh"

// out = in + add over (B, H, N, D), one block a row.
extern "C" __global__ void add(Tensor4<const float> in, Tensor4<float> out, int heads, int rows,
                               int columns, float addend) {
    const int n = blockIdx.x % rows, h = blockIdx.x / rows % heads, b = blockIdx.x / rows / heads;
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        st_global(out.row(b, h, n) + i, ld_global(in.row(b, h, n) + i) + addend);
}

extern "C" __global__ void fill(Tensor1<float> out, int first, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) st_global(out.data + first + i, 1.f);
}

extern "C" __global__ void sum(Tensor1<const float> in, Tensor1<float> out, int count) {
    float total = 0;
    for (int i = threadIdx.x; i < count; i += 32) total += ld_global(in.data + i);
    for (int mask = 16; mask; mask /= 2) total += shfl_xor(total, mask);
    if (threadIdx.x == 0) st_global(out.data, total);
}

// Threads leave one by one; those that stay meet at a barrier.
extern "C" __global__ void leave(Tensor1<int> out) {
    const int t = threadIdx.x;
    int* const turn = reinterpret_cast<int*>(shared_memory());
    if (t == 0) st_shared(turn, 0);
    block_sync();
    for (int i = 0; i < 64; ++i) {
        if (t == i) {
            st_global(out.data + t, ld_shared(turn));
            return;
        }
        block_sync();  // the thread that leaves has read
        if (t == 63) st_shared(turn, i + 1);
        block_sync();
    }
}

extern "C" __global__ void harmonic(Tensor1<float> total) {
    for (int i = 0; i < 8; ++i) {
        atomic_add_global(total.data, 1.f / (1 + 64 * i + threadIdx.x));
        warp_sync();
    }
}

extern "C" __global__ void vectors(Tensor1<const float> in, Tensor1<float> out) {
    const Vec16* p = reinterpret_cast<const Vec16*>(in.data) + threadIdx.x;
    st_global(reinterpret_cast<Vec16*>(out.data) + threadIdx.x, ld_global(p));
}

extern "C" __global__ void big_frame(Tensor1<float> out) {
#ifdef BIG
    volatile float local[20000];
    for (int i = 0; i < 20000; ++i) local[i] = float(i);
    st_global(out.data + threadIdx.x, local[threadIdx.x]);
#else
    st_global(out.data + threadIdx.x, 0.f);
#endif
}
"""


def kernel(entry: str, threads: int = 32, **macros: int) -> Kernel:
    return Kernel(SOURCE, entry, tuple(macros.items()), threads)


def add(backend: HostBackend, source: np.ndarray, out: np.ndarray) -> None:
    b, h, n, d = source.shape
    args: list[Any] = [
        from_numpy("in", source, "r"),
        from_numpy("out", out, "w"),
        *(np.int32(x) for x in (h, n, d)),
        np.float32(1),
    ]
    backend.launch(kernel("add"), (b * h * n, 1, 1), 0, args)


VIEWS = {
    "dense": lambda x: x,
    "permuted": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "packed": lambda x: np.stack([x, 0 * x, x], axis=3)[:, :, :, 0, :],
    "slice": lambda x: np.pad(x, [(1, 1), (0, 2), (3, 1), (4, 8)])[1:-1, :-2, 3:-1, 4:-8],
    "expanded": lambda x: np.broadcast_to(x[:, :1, :, :], x.shape),
    "one column": lambda x: np.pad(x[..., :1], [(0, 0)] * 3 + [(0, 7)])[..., :1],
}


@pytest.mark.parametrize("os_threads", [1, 3])
@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, os_threads: int) -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 5, 24)).astype(np.float32)
    source = VIEWS[name](values)
    buffer = np.full((2, 7, 3, 40), -7, np.float32)
    out = buffer[:, 1:6, :, 8 : 8 + source.shape[3]].swapaxes(1, 2)  # rows with gaps, permuted
    backend = HostBackend(os_threads=os_threads)
    add(backend, source, out)
    np.testing.assert_array_equal(out, source + np.float32(1))
    assert (buffer == -7).sum() == buffer.size - out.size
    count = 4 * source.size
    assert backend.traffic == {"add": {("in", "read"): count, ("out", "write"): count}}


def test_counters_accumulate_until_reset() -> None:
    backend = HostBackend()
    assert isinstance(backend, Backend)
    x, out = np.zeros((1, 1, 2, 8), np.float32), np.zeros((1, 1, 2, 8), np.float32)
    add(backend, x, out)
    add(backend, x, out)
    assert backend.traffic["add"] == {("in", "read"): 128, ("out", "write"): 128}
    backend.reset()
    assert backend.traffic == {}
    unchecked = HostBackend(checks=False)
    add(unchecked, x, out)
    assert unchecked.traffic["add"] == {("in", "read"): 64, ("out", "write"): 64}


def test_scratch_remembers_what_was_written() -> None:
    backend = HostBackend()
    scratch = backend.empty("scratch", (64,), "fp32")
    out = np.zeros(1, np.float32)

    def total(count: int) -> float:
        args: list[Any] = [scratch.with_access("r"), from_numpy("out", out, "w"), np.int32(count)]
        backend.launch(kernel("sum"), (1, 1, 1), 0, args)
        return float(out[0])

    def fill(access: str, first: int, count: int) -> None:
        args: list[Any] = [scratch.with_access(access), np.int32(first), np.int32(count)]
        backend.launch(kernel("fill"), (1, 1, 1), 0, args)

    with pytest.raises(KernelError, match=r"uninitialised.*'scratch'.*index \(0,\)"):
        total(64)
    fill("rw", 0, 40)
    assert total(40) == 40
    with pytest.raises(KernelError, match=r"uninitialised.*index \(40,\)"):
        total(41)
    with pytest.raises(KernelError, match=r"unwritten.*index \(0,\).*40 elements"):
        fill("w", 40, 24)
    with pytest.raises(KernelError, match="uninitialised"):
        total(64)  # the failed launch wrote nothing
    fill("rw", 40, 24)
    assert total(64) == 64
    fill("w", 0, 64)


def test_threads_may_leave_before_a_barrier() -> None:
    out = np.full(64, -1, np.int32)
    for seed in (None, 3):
        HostBackend(seed=seed).launch(kernel("leave", 64), (1, 1, 1), 4, [from_numpy("out", out, "w")])
        np.testing.assert_array_equal(out, np.arange(64))


def test_a_seed_orders_threads_reproducibly() -> None:
    # A sum of floats tells in which order its terms came.
    def total(seed: int | None) -> float:
        out = np.zeros(1, np.float32)
        args: list[Any] = [from_numpy("total", out, "atomic")]
        HostBackend(seed=seed, os_threads=1).launch(kernel("harmonic", 64), (1, 1, 1), 0, args)
        return float(out[0])

    seeds = [None, *range(8)]
    first = [total(seed) for seed in seeds]
    assert first == [total(seed) for seed in seeds]
    assert len(set(first)) > 3
    exact = sum(1 / k for k in range(1, 513))
    assert max(abs(value - exact) for value in first) < 512 * 2.0**-24 * exact


def test_alignment_of_the_users_memory_counts() -> None:
    # A view that starts at an odd element is misaligned on a GPU, so it must be here.
    memory = np.zeros(200, np.float32)
    start = -memory.ctypes.data % 16 // 4
    out = np.zeros(128, np.float32)
    for shift in range(4):
        args: list[Any] = [
            from_numpy("in", memory[start + shift : start + shift + 128], "r"),
            from_numpy("out", out, "w"),
        ]
        if shift == 0:
            HostBackend().launch(kernel("vectors"), (1, 1, 1), 0, args)
            continue
        with pytest.raises(KernelError, match="misaligned") as caught:
            HostBackend().launch(kernel("vectors"), (1, 1, 1), 0, args)
        assert caught.value.tensor == "in"


def test_written_views_must_not_overlap_themselves() -> None:
    memory = np.zeros(64, np.float32)
    overlapping = np.lib.stride_tricks.as_strided(memory, (1, 1, 4, 8), (0, 0, 16, 4))
    with pytest.raises(KernelError, match="overlapping"):
        add(HostBackend(), np.zeros((1, 1, 4, 8), np.float32), overlapping)
    add(HostBackend(), overlapping, np.zeros((1, 1, 4, 8), np.float32))  # reading one is fine


def test_empty_tensors() -> None:
    args: list[Any] = [from_numpy("out", np.zeros(0, np.float32), "w"), np.int32(0), np.int32(0)]
    HostBackend().launch(kernel("fill"), (1, 1, 1), 0, args)
    args[2] = np.int32(1)
    with pytest.raises(KernelError, match=r"out of bounds.*'out'"):
        HostBackend().launch(kernel("fill"), (1, 1, 1), 0, args)


def test_wrong_arguments_are_refused() -> None:
    backend = HostBackend()
    out = from_numpy("out", np.zeros(4, np.float32), "w")
    good: list[Any] = [out, np.int32(0), np.int32(4)]
    fill = kernel("fill")
    backend.launch(fill, (1, 1, 1), 0, good)
    with pytest.raises(TypeError, match="takes 3 arguments, 2 are given"):
        backend.launch(fill, (1, 1, 1), 0, good[:2])
    with pytest.raises(TypeError, match=r"argument 2 \(int64\) has 8 bytes, .* 4"):
        backend.launch(fill, (1, 1, 1), 0, [*good[:2], np.int64(4)])
    with pytest.raises(TypeError, match="4 of type int: give one of"):
        backend.launch(fill, (1, 1, 1), 0, [*good[:2], 4])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"0\.5 of type float: give one of"):
        backend.launch(fill, (1, 1, 1), 0, [*good[:2], 0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"grid.y = 65536 is outside 1..65535"):
        backend.launch(fill, (1, 65536, 1), 0, good)
    with pytest.raises(ValueError, match=r"grid.x = 0"):
        backend.launch(fill, (0, 1, 1), 0, good)
    with pytest.raises(ValueError, match=r"300000 bytes of shared memory .* 232448"):
        backend.launch(fill, (1, 1, 1), 300_000, good)


def test_number_of_os_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_HOST_THREADS", "3")
    assert HostBackend().os_threads == 3
    monkeypatch.setenv("REPRO_HOST_THREADS", "no")
    with pytest.raises(ValueError, match="REPRO_HOST_THREADS='no'"):
        HostBackend()
    with pytest.raises(ValueError, match="os_threads = 0"):
        HostBackend(os_threads=0)


def test_arrays_say_what_is_wrong() -> None:
    memory = np.zeros((4, 6), np.float32)
    with pytest.raises(ValueError, match="last dimension has stride 6"):
        from_numpy("x", memory.T, "r")
    with pytest.raises(TypeError, match="complex128"):
        from_numpy("x", np.zeros(3, complex), "r")
    with pytest.raises(TypeError, match="'fp128'"):
        Array("x", 0, (1,), (1,), "fp128", "r")
    with pytest.raises(ValueError, match="access 'x'"):
        Array("x", 0, (1,), (1,), "fp32", "x")
    with pytest.raises(ValueError, match="not a multiple of 4"):
        Array("x", 2, (1,), (1,), "fp32", "r")
    with pytest.raises(ValueError, match="read-only"):
        from_numpy("x", np.broadcast_to(memory, (2, 4, 6)), "w")
    with pytest.raises(ValueError, match="multiple of 32"):
        Kernel(SOURCE, "add", (), 33)
    x = Array("x", 4096, (2, 3, 5, 8), (900, 300, 10, 1), "fp16", "r")
    fields = np.frombuffer(encode(x), np.int64)
    assert list(fields) == [4096, 900, 300, 10]
    rows = Array("lse", 4096, (2, 3, 5), (15, 5, 1), "fp32", "w")
    assert list(np.frombuffer(encode(rows), np.int64)) == [4096, 15, 5]
    assert x.extent_bytes == 2 * (900 + 600 + 40 + 7 + 1)


def test_compile_errors_name_the_place() -> None:
    broken = Kernel('#include "device.cuh"\nint x = nonsense;\n', "broken", (), 32)
    with pytest.raises(HostCompileError, match=r"broken.cu:2:.*nonsense"):
        HostBackend().launch(broken, (1, 1, 1), 0, [])
    out = from_numpy("out", np.zeros(32, np.float32), "w")
    HostBackend().launch(kernel("big_frame"), (1, 1, 1), 0, [out])
    with pytest.raises(HostCompileError, match="frame size of 80"):
        HostBackend().launch(kernel("big_frame", BIG=1), (1, 1, 1), 0, [out])


def test_a_missing_compiler_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostCompileError, match=r"^CXX=no-such-compiler: no such compiler$"):
        find_compiler.__wrapped__("no-such-compiler")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HostCompileError, match=r"^no C\+\+ compiler: install one"):
        find_compiler.__wrapped__(None)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path / "file"))
    unseen = Kernel(SOURCE, "fill", (("UNSEEN", 1),), 32)
    with pytest.raises(HostCompileError, match=r"^cannot keep compiled .* set REPRO_CACHE_DIR"):
        HostBackend().launch(unseen, (1, 1, 1), 0, [])


COLD_PROCESS = """
import sys
import numpy as np
from kernels.host import HostBackend
from kernels.launch import Kernel, from_numpy
out = np.zeros(4, np.float32)
kernel = Kernel(open(sys.argv[1]).read(), "fill", (), 32)
HostBackend().launch(kernel, (1, 1, 1), 0, [from_numpy("out", out, "w"), np.int32(0), np.int32(4)])
assert out.tolist() == [1, 1, 1, 1]
"""


def test_processes_share_a_cold_cache(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(SOURCE)
    cache = tmp_path / "cache"
    # The runtime takes seconds to build: only the kernel is raced for.
    runtime = Path(runtime_library()._name).parent
    shutil.copytree(runtime, cache / "host" / runtime.name)
    environment = {**os.environ, "REPRO_CACHE_DIR": str(cache)}
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", COLD_PROCESS, str(source)]
    running = [subprocess.Popen(command, env=environment, cwd=root) for _ in range(2)]
    assert [process.wait(timeout=200) for process in running] == [0, 0]
    made = {path.name for path in (cache / "host").iterdir()} - {runtime.name, ".lock"}
    assert len(made) == 1, "one kernel, no leftovers"
    assert len(list((cache / "host").glob("fill-*/*"))) == 1
