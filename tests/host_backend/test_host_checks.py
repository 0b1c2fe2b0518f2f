"""Every check of the host backend catches a fault planted for it, and passes the repaired kernel.

The kernels are two sources with a run-time switch, so that the compiler runs twice and not once
a fault. Each fault stands beside its repair: an even number is broken, the next odd one is right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.host import HostBackend, KernelError
from kernels.launch import Kernel, from_numpy

GLOBAL_FAULTS = r"""
#include "device.cuh"

// 64 threads a block. in: (1, 1, 8, 16) fp32, out: (1, 1, 8, 16) fp32 with padded rows (stride 20)
extern "C" __global__ void global_faults(Tensor4<const float> in, Tensor4<float> out,
                                         Tensor1<float> state, Tensor1<float> sums, int variant,
                                         int64 far) {
    const int t = threadIdx.x;
    const bool repaired = variant & 1;
    float* first = out.row(0, 0, 0);
    if (variant / 2 != 6 && blockIdx.x == 0)
        for (int i = t; i < 128; i += 64) st_global(out.row(0, 0, i / 16) + i % 16, 1.f);
    block_sync();
    switch (variant / 2) {
        case 0:  // one element past the end
            ld_global(in.row(0, 0, 0) + (repaired ? 127 : 128));
            break;
        case 1:  // far away, as a 32-bit overflow would go
            if (!repaired) ld_global(in.row(0, 0, 0) + far);
            break;
        case 2:  // between the rows of a strided view
            if (t == 3 && blockIdx.x == 0) st_global(first + (repaired ? 15 : 17), 2.f);
            break;
        case 3:  // a vector across the end of a row
            if (t == 0 && blockIdx.x == 0)
                st_global(reinterpret_cast<Vec16*>(first + (repaired ? 12 : 14) / 4 * 4 +
                                                   (repaired ? 0 : 4)), Vec16{});
            break;
        case 4:  // 8 bytes at a multiple of 4
            ld_global(reinterpret_cast<const Vec8*>(in.row(0, 0, 0) + (repaired ? 2 : 3)));
            break;
        case 5:  // writes an input
            if (!repaired) st_global(const_cast<float*>(in.row(0, 0, 0)), 0.f);
            break;
        case 6:  // leaves an output element out
            if (blockIdx.x == 0)
                for (int i = t; i < (repaired ? 128 : 127); i += 64)
                    st_global(out.row(0, 0, i / 16) + i % 16, 1.f);
            break;
        case 7:  // reads what another thread of the block wrote, without a barrier
            if (blockIdx.x == 0) {
                st_global(state.data + t, 1.f);
                if (repaired) block_sync();
                ld_global(state.data + (t ^ 32));
            }
            break;
        case 8:  // the same within a warp
            if (blockIdx.x == 0) {
                st_global(state.data + t, 1.f);
                if (repaired) warp_sync();
                ld_global(state.data + (t ^ 1));
            }
            break;
        case 9:  // two blocks write one element
            if (t == 0) st_global(state.data + (repaired ? blockIdx.x : 0), 1.f);
            break;
        case 10:  // one block reads what another writes
            if (blockIdx.x == 0 && t == 0) st_global(state.data, 1.f);
            if (blockIdx.x == 1 && t == 0) ld_global(state.data + (repaired ? 1 : 0));
            break;
        case 11:  // many readers, then a writer that no barrier orders after them
            if (blockIdx.x == 0) {
                ld_global(state.data + 5);
                if (repaired) block_sync();
                if (t == 63) st_global(state.data + 5, 1.f);
            }
            break;
        case 12:  // plain addition where atomics are meant
            if (repaired)
                atomic_add_global(sums.data, 1.f);
            else
                st_global(sums.data, ld_global(sums.data) + 1.f);
            break;
        case 13:  // half an element
            ld_global(reinterpret_cast<const uint16*>(in.row(0, 0, 0)) + (repaired ? 0 : 1));
            break;
        case 14:  // a shared address through a global load
            if (!repaired) ld_global(reinterpret_cast<float*>(shared_memory()));
            break;
        case 15:  // a null pointer
            if (!repaired) ld_global(static_cast<const float*>(nullptr));
            break;
        case 16:  // overwrites what a cp_async is still reading
            if (blockIdx.x == 0) {
                if (t == 0) cp_async_16(shared_memory(), state.data, true);
                cp_async_commit();
                if (repaired) cp_async_wait<0>();
                block_sync();
                if (t == 1) st_global(state.data, 1.f);
                cp_async_wait<0>();
            }
            break;
    }
}
"""

ANY = (-1,)  # which element is found first depends on the order of the threads
# fault, its name, kind, tensor, index
GLOBAL_CASES = [
    (0, "past the end", "out of bounds", "in", None),
    (1, "far away", "out of bounds", "in", None),
    (2, "between rows", "out of bounds", "out", None),
    (3, "vector across a row", "out of bounds", "out", None),
    (4, "misaligned", "misaligned", "in", (0, 0, 0, 3)),
    (5, "input written", "access", "in", (0, 0, 0, 0)),
    (6, "unwritten output", "unwritten", "out", (0, 0, 7, 15)),
    (7, "no barrier", "race", "state", (0,)),
    (8, "no warp barrier", "race", "state", ANY),
    (9, "two writing blocks", "race", "state", (0,)),
    (10, "reading and writing block", "race", "state", (0,)),
    (11, "readers before a writer", "race", "state", (5,)),
    (12, "no atomic", "access", "sums", (0,)),
    (14, "shared address", "out of bounds", None, None),
    (15, "null pointer", "out of bounds", None, None),
    (16, "source of a copy", "race", "state", (0,)),
]


def run_global(variant: int, backend: HostBackend, far: int = 2**31) -> dict[str, np.ndarray]:
    memory = {
        "in": np.arange(128, dtype=np.float32).reshape(1, 1, 8, 16),
        "out": np.full((1, 1, 8, 20), -7, np.float32),
        "state": np.full(64, -7, np.float32),
        "sums": np.zeros(1, np.float32),
    }
    args: list[Any] = [
        from_numpy("in", memory["in"], "r"),
        from_numpy("out", memory["out"][..., :16], "w"),
        from_numpy("state", memory["state"], "rw"),
        from_numpy("sums", memory["sums"], "atomic"),
        np.int32(variant),
        np.int64(far),
    ]
    try:
        backend.launch(Kernel(GLOBAL_FAULTS, "global_faults", (), 64), (2, 1, 1), 1024, args)
    except KernelError:
        assert (memory["out"] == -7).all(), "memory changed although the launch failed"
        assert (memory["state"] == -7).all(), "memory changed although the launch failed"
        raise
    assert (memory["out"][..., 16:] == -7).all(), "bytes between the rows changed"
    return memory


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    ("fault", "kind", "tensor", "index"), [pytest.param(f, k, t, i, id=n) for f, n, k, t, i in GLOBAL_CASES]
)
def test_global_memory(
    fault: int, kind: str, tensor: str | None, index: tuple[int, ...] | None, seed: int | None
) -> None:
    backend = HostBackend(seed=seed)
    run_global(2 * fault + 1, backend)
    with pytest.raises(KernelError) as caught:
        run_global(2 * fault, backend)
    error = caught.value
    assert (error.kind, error.tensor, error.kernel) == (kind, tensor, "global_faults")
    if index != ANY and (seed is None or kind != "race"):
        assert error.index == index
    if kind != "unwritten":
        assert error.block is not None
        assert error.block[0] in (0, 1)
        assert error.thread is not None
        assert 0 <= error.thread < 64
        assert "global_faults.cu:" in str(error)
    for word in filter(None, ["global_faults", kind, tensor]):
        assert word in str(error)


@pytest.mark.parametrize("far", [2**31, -(2**31), 2**32, 128, -1, 2**33 - 1])
def test_any_offset_is_attributed_to_its_tensor(far: int) -> None:
    with pytest.raises(KernelError, match="out of bounds") as caught:
        run_global(2, HostBackend(), far)
    assert caught.value.tensor == "in"
    assert caught.value.offset_bytes == far * 4


@pytest.mark.parametrize("variant", [26, 27])
def test_part_of_an_element(variant: int) -> None:
    with pytest.raises(KernelError, match="part of a 4-byte element"):
        run_global(variant, HostBackend())


def test_atomics_of_all_threads_add_up() -> None:
    memory = run_global(25, HostBackend())
    assert memory["sums"][0] == 128


SHARED_FAULTS = r"""
#include "device.cuh"

// 96 threads, 4096 bytes of shared memory. in: 2048 fp16.
extern "C" __global__ void shared_faults(Tensor1<const fp16> in, Tensor1<float> out, int variant) {
    unsigned char* const bytes = shared_memory();
    float* const words = reinterpret_cast<float*>(bytes);
    fp16* const halves = reinterpret_cast<fp16*>(bytes);
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const bool repaired = variant & 1;
    const fp16* const mine = in.data + 8 * t;
    uint32 r[4];
    float x = 0;
    if (variant / 2 > 3) {  // the first faults are about bytes that nobody wrote
        for (int i = t; i < 1024; i += 96) st_shared(words + i, 0.f);
        block_sync();
    }
    switch (variant / 2) {
        case 0:  // past the dynamic size
            st_shared(words + (repaired ? 1023 - t : 1024 - t), 1.f);
            break;
        case 1:  // 16 bytes at a multiple of 8
            st_shared(reinterpret_cast<Vec16*>(bytes + 16 * t + (repaired ? 0 : 8)), Vec16{});
            break;
        case 2:  // never written
            st_shared(words + t, 1.f);
            block_sync();
            x = ld_shared(words + t + (repaired ? 0 : 1));
            break;
        case 3:  // a vector of which the last two bytes were never written
            for (int i = 0; i < (repaired ? 8 : 7); ++i) st_shared(halves + 8 * t + i, fp16{0});
            ld_shared(reinterpret_cast<Vec16*>(halves + 8 * t));
            break;
        case 4:  // read of another warp's word without a barrier
            st_shared(words + t, 1.f);
            if (repaired) block_sync();
            x = ld_shared(words + (t + 32) % 96);
            break;
        case 5:  // the same within a warp
            st_shared(words + t, 1.f);
            if (repaired) warp_sync();
            x = ld_shared(words + (t ^ 1));
            break;
        case 6:  // a warp barrier does not order two warps
            st_shared(words + t, 1.f);
            if (repaired) block_sync(); else warp_sync();
            x = ld_shared(words + (t + 32) % 96);
            break;
        case 7:  // two writers of a word; neighbouring halves of a word are fine
            if (repaired) st_shared(halves + t, fp16{1});
            else st_shared(words + t / 2, 1.f);
            break;
        case 8:  // overwritten while others may still read
            st_shared(words + t, 1.f);
            block_sync();
            x = ld_shared(words + 5);
            if (repaired) block_sync();
            if (t == 5) st_shared(words + 5, 2.f);
            break;
        case 9:  // the same, one reader
            if (t == 0) st_shared(words, 1.f);
            block_sync();
            if (t == 70) x = ld_shared(words);
            if (repaired) block_sync();
            if (t == 5) st_shared(words, 2.f);
            break;
        case 10:  // cp_async data read by its own thread before the wait
            cp_async_16(bytes + 16 * t, mine, true);
            cp_async_commit();
            if (repaired) cp_async_wait<0>();
            ld_shared(reinterpret_cast<Vec16*>(bytes + 16 * t));
            cp_async_wait<0>();
            break;
        case 11:  // by other threads after the wait, before the barrier
            cp_async_16(bytes + 16 * t, mine, true);
            cp_async_commit();
            cp_async_wait<0>();
            if (repaired) block_sync();
            ld_shared(reinterpret_cast<Vec16*>(bytes + 16 * (t ^ 1)));
            break;
        case 12:  // by other threads after a barrier but without the wait
            cp_async_16(bytes + 16 * t, mine, true);
            cp_async_commit();
            if (repaired) cp_async_wait<0>();
            block_sync();
            ld_shared(reinterpret_cast<Vec16*>(bytes + 16 * (t ^ 1)));
            break;
        case 13:  // the destination overwritten while the copy is in flight
            cp_async_16(bytes + 16 * t, mine, true);
            cp_async_commit();
            if (repaired) cp_async_wait<0>();
            st_shared(reinterpret_cast<Vec16*>(bytes + 16 * t), Vec16{});
            cp_async_wait<0>();
            break;
        case 14:  // a copy into what others may still read
            st_shared(reinterpret_cast<Vec16*>(bytes + 16 * t), Vec16{});
            block_sync();
            ld_shared(reinterpret_cast<Vec16*>(bytes + 16 * ((t + 32) % 96)));
            if (repaired) block_sync();
            cp_async_16(bytes + 16 * t, mine, true);
            break;
        case 15:  // two groups, one allowed pending: the newer one is not there yet
            cp_async_16(bytes + 32 * t, mine, true);
            cp_async_commit();
            cp_async_16(bytes + 32 * t + 16, mine, true);
            cp_async_commit();
            cp_async_wait<1>();
            ld_shared(reinterpret_cast<Vec16*>(bytes + 32 * t + (repaired ? 0 : 16)));
            break;
        case 16:  // never committed
            cp_async_16(bytes + 16 * t, mine, true);
            if (repaired) cp_async_commit();
            cp_async_wait<0>();
            ld_shared(reinterpret_cast<Vec16*>(bytes + 16 * t));
            break;
        case 17:  // ldmatrix of rows that other lanes just wrote
            st_shared(reinterpret_cast<Vec16*>(bytes + 16 * t), Vec16{});
            if (repaired) warp_sync();
            ldmatrix_x4(r, bytes + 16 * (warp * 32 + 31 - lane));
            break;
        case 18:  // ldmatrix row at a multiple of 8
            st_shared(reinterpret_cast<Vec16*>(bytes + 16 * t), Vec16{});
            block_sync();
            ldmatrix_x4(r, bytes + 16 * (t % 64) + (repaired ? 0 : 8));
            break;
        case 19:  // lanes of a warp in different collectives
            if (lane < 16 || repaired) warp_sync();
            else shfl_xor(1, 1);
            break;
        case 20:  // a collective after some lanes left
            if (lane == 7 && !repaired) return;
            x = shfl(float(t), 3);
            break;
        case 21:  // lanes leave while others wait in a collective
            if (lane == 0 || repaired) x = shfl(float(t), 3);
            break;
        case 22:  // a barrier that a warp never reaches
            if (warp != 1 || lane > 15 || repaired) block_sync();
            else warp_sync();
            break;
        case 23:  // barriers on both sides of a branch
            if (t < 32 && !repaired) {
                block_sync();
            } else {
                block_sync();
            }
            break;
        case 24:  // a line written by halves, then read and overwritten whole by another warp
            st_shared(halves + t, fp16{0});
            block_sync();
            if (t == 40) ld_shared(reinterpret_cast<Vec16*>(bytes));
            if (repaired) block_sync();
            if (t == 80) st_shared(reinterpret_cast<Vec16*>(bytes), Vec16{});
            break;
        case 26:  // lanes that left do not count at a warp_sync, but still have written
            if (lane < 8) {
                st_shared(words + t, 2.f);
                return;
            }
            if (repaired) warp_sync();
            x = ld_shared(words + t / 32 * 32);
            break;
        case 25:  // a global address in shared memory's place
            if (!repaired) ld_shared(in.data);
            break;
    }
    st_global(out.data + t, x);
}
"""

SHARED_CASES = [
    (0, "past the end", "out of bounds", 4096),
    (1, "misaligned", "misaligned", 8),
    (2, "never written", "uninitialised", 384),
    (3, "partly written", "uninitialised", None),
    (4, "no barrier", "race", None),
    (5, "no warp barrier", "race", None),
    (6, "warp barrier between warps", "race", None),
    (7, "two writers", "race", None),
    (8, "many readers", "race", 20),
    (9, "one reader", "race", 0),
    (10, "copy not waited for", "race", None),
    (11, "copy without barrier", "race", None),
    (12, "barrier without wait", "race", None),
    (13, "overwritten copy", "race", None),
    (14, "copy over read data", "race", None),
    (15, "newer group", "race", None),
    (16, "not committed", "race", None),
    (17, "ldmatrix race", "race", None),
    (18, "ldmatrix misaligned", "misaligned", None),
    (19, "mixed collectives", "divergence", None),
    (20, "collective after exit", "divergence", None),
    (21, "exit beside collective", "divergence", None),
    (22, "barrier never reached", "deadlock", None),
    (23, "two barriers", "divergence", None),
    (24, "split line", "race", 0),
    (25, "global address", "out of bounds", None),
    (26, "lanes that left", "race", None),
]


def run_shared(variant: int, backend: HostBackend) -> np.ndarray:
    halves = np.arange(2048, dtype=np.float16)
    out = np.full(96, -7, np.float32)
    args: list[Any] = [
        from_numpy("in", halves, "r"),
        from_numpy("out", out, "rw"),  # not "w": some faults leave early and write nothing
        np.int32(variant),
    ]
    try:
        backend.launch(Kernel(SHARED_FAULTS, "shared_faults", (), 96), (1, 1, 1), 4096, args)
    except KernelError:
        assert (out == -7).all(), "memory changed although the launch failed"
        raise
    return out


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(("fault", "kind", "offset"), [pytest.param(f, k, o, id=n) for f, n, k, o in SHARED_CASES])
def test_shared_memory_and_barriers(fault: int, kind: str, offset: int | None, seed: int | None) -> None:
    backend = HostBackend(seed=seed)
    run_shared(2 * fault + 1, backend)
    with pytest.raises(KernelError) as caught:
        run_shared(2 * fault, backend)
    error = caught.value
    assert (error.kind, error.tensor) == (kind, None)
    assert error.block == (0, 0, 0)
    assert error.thread is not None
    if offset is not None and (seed is None or kind != "misaligned"):
        assert error.offset_bytes == offset
    assert "shared_faults.cu:" in str(error)


def test_deadlock_names_who_waits_and_where() -> None:
    with pytest.raises(KernelError, match=r"deadlock") as caught:
        run_shared(2 * 22, HostBackend())
    message = str(caught.value)
    start = SHARED_FAULTS.index("if (warp != 1 || lane > 15")
    barrier = 1 + SHARED_FAULTS[:start].count("\n")
    collective = barrier + 1
    place = "shared_faults.cu"
    assert f"threads 0-31 wait in block_sync at {place}:{barrier}" in message
    assert f"threads 64-95 wait in block_sync at {place}:{barrier}" in message
    assert f"lanes ffff0000 of warp 1 wait in block_sync at {place}:{barrier}" in message
    assert f"lanes 0000ffff of warp 1 wait in warp_sync at {place}:{collective}" in message


def test_faults_pass_without_checks_where_that_is_safe() -> None:
    # The reason for the checks: on these schedules the broken kernels run to their end.
    for fault in (4, 5, 8, 12):
        run_shared(2 * fault, HostBackend(checks=False))
