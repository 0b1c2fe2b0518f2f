"""The host backend's rules for Hopper's asynchronous units, each with a fault planted against it.

One kernel: a producer warpgroup, two consumer warpgroups, and around them the mistakes that people
make. An even variant is broken, the next odd one is its repair. A fault must be found in every
order of the threads that is tried, not only where it happens to show.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kernels.host import HostBackend, KernelError
from kernels.launch import Array, Kernel, TensorMap, from_numpy

FAULTS = r"""
#define DTYPE 0
#include "device_sm90.cuh"

constexpr int TILE = 64 * 64 * 2, STAGES = 2, TILES = 5;
constexpr int BARRIERS_AT = 4 * TILE;  // two stages, an operand, a tile to store
struct Barriers { Mbarrier full[STAGES], empty[STAGES], extra; };

// A pipeline of TILES boxes through STAGES stages, as the attention kernels have it, with faults.
extern "C" __global__ void __launch_bounds__(384, 1)
hopper_faults(const __grid_constant__ TensorMap in, const __grid_constant__ TensorMap out,
              Tensor1<const float> row, Tensor1<float> result, Tensor1<float> sums, int variant) {
    unsigned char* const shared = shared_memory_1024();
    unsigned char* const operand = shared + 2 * TILE;
    unsigned char* const stored = shared + 3 * TILE;
    float* const words = reinterpret_cast<float*>(stored);
    Barriers* const b = reinterpret_cast<Barriers*>(shared + BARRIERS_AT);
    const int t = threadIdx.x, lane = t % 32, group = t / 128;
    const bool repaired = variant & 1;
    const int fault = variant / 2;
    auto broken = [&](int which) { return fault == which && !repaired; };

    if (t == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(&b->full[s], 1);
            mbarrier_init(&b->empty[s], broken(39) ? 4 : 8);
        }
        if (!broken(8)) mbarrier_init(&b->extra, 1);
        if (!broken(10)) mbarrier_init_done();
    }
    // B of the products: zeros, written by ordinary stores.
    if (broken(12)) tma_fence();
    for (int i = t; i < TILE / 16; i += 384) {
        st_shared(reinterpret_cast<Vec16*>(operand) + i, Vec16{});
        st_shared(reinterpret_cast<Vec16*>(stored) + i, Vec16{});
    }
    if (!broken(11) && !broken(12)) tma_fence();
    if (!broken(9)) block_sync();

    // ---- single rules, before the pipeline ------------------------------------------------------
    float x = 0.0f;
    if (fault == 8 && t == 0) mbarrier_arrive(&b->extra);
    if (fault == 13 && t == 0) {  // stores what was written without a fence
        st_shared(words, 1.0f);
        if (repaired) tma_fence();
        tma_store(&out, stored, 0, 0, 0, 0, 0);
        bulk_commit();
        bulk_wait<0>();
    }
    if (fault == 14 && t == 0) {  // overwrites it before it has been read
        tma_store(&out, stored, 0, 0, 0, 0, 0);
        bulk_commit();
        if (repaired) bulk_wait_read<0>();
        st_shared(words, 1.0f);
        tma_fence();
        bulk_wait<0>();
    }
    if (fault == 15 && t == 0) {  // leaves before the store is done
        tma_store(&out, stored, 0, 0, 0, 0, 0);
        bulk_commit();
        if (repaired) bulk_wait<0>();
    }
    if (fault == 16 && t == 0) {  // waits for a group that was never closed
        bulk_add(sums.data, words, 64);
        if (repaired) bulk_commit();
        bulk_wait<0>();
    }
    if (fault == 40 && t == 0) {  // 16 bytes are added at a multiple of 16
        const float four[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        add_global_x4(sums.data + (repaired ? 4 : 2), four);
    }
    if (fault == 17) {  // two groups, one may be pending: the second is
        if (t == 0) {
            bulk_add(sums.data, words, 64);
            bulk_commit();
            bulk_add(sums.data, words + 64, 64);
            bulk_commit();
            bulk_wait_read<1>();
            st_shared(words + (repaired ? 0 : 64), 1.0f);
            bulk_wait<0>();
        }
    }
    if (fault == 18) {  // reads what the copy engine brought without waiting for it
        if (t == 0) {
            mbarrier_expect(&b->extra, 64);
            bulk_load(operand, row.data, 64, &b->extra);
        }
        if (repaired) mbarrier_wait(&b->extra, 0);
        x = ld_shared(reinterpret_cast<float*>(operand) + t % 16);
        block_sync();
        if (t < 4) st_shared(reinterpret_cast<Vec16*>(operand) + t, Vec16{});
        tma_fence();
        block_sync();
    }
    if (fault == 19 && t == 0) {  // sizes are multiples of 16
        mbarrier_expect(&b->extra, repaired ? 64 : 60);
        bulk_load(stored, row.data, repaired ? 64 : 60, &b->extra);
        mbarrier_wait(&b->extra, 0);
    }
    if (fault == 20 && t == 0) {  // a swizzled tile starts on a multiple of 1024 bytes
        mbarrier_expect(&b->extra, TILE);
        tma_load(stored + (repaired ? 0 : -128), &in, &b->extra, 0, 0, 0, 0, 0);
        mbarrier_wait(&b->extra, 0);
    }
    if (fault == 21 && t == 0) mbarrier_wait(&b->extra, repaired ? 1 : 2);  // parity is 0 or 1
    if (fault == 22) {  // a named barrier that the two sides count differently
        if (group == 0)
            named_arrive(1, repaired ? 256 : 384);
        else if (group == 1)
            named_sync(1, 256);
    }
    if (fault == 23) {  // or that one side never reaches
        if (group == 0 && (repaired || t >= 32)) named_arrive(3, 256);
        if (group == 1) named_sync(3, 256);
    }
    if (fault == 24 && group == 0) named_sync(repaired ? 4 : 0, 128);  // 0 is the block's
    if (fault == 25) {  // data handed over without any barrier
        if (group == 0) st_shared(words + t, 1.0f);
        if (repaired) {
            if (group == 0) named_arrive(5, 256);
            if (group == 1) named_sync(5, 256);
        }
        if (group == 1) x = ld_shared(words + t - 128);
    }
    if (fault == 26 && t == 0) {  // more arrivals than the barrier was set up for
        mbarrier_arrive(&b->extra);
        if (!repaired) {
            mbarrier_expect(&b->extra, 64);
            mbarrier_arrive(&b->extra);
        }
    }
    if (fault == 27 && t == 0) mbarrier_init(repaired ? &b->extra + 1 : &b->extra, 1);  // twice
    if (fault == 41 && group == 1) {  // one thread adds, and its warp goes on to a named barrier
        if (t == 128) {
            bulk_add(sums.data, words, 64);
            bulk_commit();
            bulk_wait<0>();
        }
        if (repaired) warp_sync();
        named_sync(7, 128);
    }
    if (fault == 42 && group == 1) {  // or to a collective
        if (t == 128) bulk_wait<0>();
        if (repaired) x += shfl(x, 0);
        uint32 r[4] = {};
        stmatrix_x4(stored + t % 32 * 16 + t / 32 * 512, r);
        tma_fence();
    }
    warp_sync();

    // ---- the pipeline ---------------------------------------------------------------------------
    if (group == 0) {
        if (!broken(28) && !(broken(31) && t < 32)) {
            if (fault == 29 && !repaired)
                registers_shrink<32>();
            else
                registers_shrink<24>();
        }
        if (t != 0) return;
        for (int it = 0; it < TILES; ++it) {
            const int s = it % STAGES, parity = it / STAGES & 1;
            if (!broken(1)) mbarrier_wait(&b->empty[s], parity ^ 1);
            mbarrier_expect(&b->full[s], broken(3) ? TILE - 16 : broken(4) ? TILE + 16 : TILE);
            tma_load(shared + s * TILE, &in, &b->full[s], 0, 64 * it, 0, 0, 0);
        }
        return;
    }
    if (broken(30))
        registers_grow<160>();
    else
        registers_grow<240>();
    float acc[32];
    for (int i = 0; i < 32; ++i) acc[i] = 0.0f;
    const uint64 rhs = smem_descriptor(operand, 16, broken(35) ? 65536 : 1024) |
                       (broken(36) ? 1ull << 63 : 0);
    for (int it = 0; it < TILES; ++it) {
        const int s = it % STAGES, parity = it / STAGES & 1;
        if (!broken(2)) mbarrier_wait(&b->full[s], broken(5) ? parity ^ 1 : parity);
        wgmma_fence();
        uint64 lhs = smem_descriptor(shared + s * TILE, 16, 1024);
        if (broken(34) && lane == 7) lhs += 2;
        Wgmma<64>::ss<0, 0>(acc, lhs, rhs);
        wgmma_commit();
        if (broken(6) && lane == 0) mbarrier_arrive(&b->empty[s]);
        if (!broken(7) && !broken(32)) wgmma_wait<0>();
        if (broken(7) && lane == 0) mbarrier_arrive(&b->empty[s]);
        if (broken(7)) wgmma_wait<0>();
        keep(acc);
        if (lane == 0 && !broken(6) && !broken(7) && !(broken(0) && t == 128))
            mbarrier_arrive(&b->empty[s]);
    }
    if (fault == 33) {  // stops waiting one group too early
        wgmma_fence();
        Wgmma<64>::ss<0, 0>(acc, rhs, rhs);
        if (repaired) wgmma_commit();
        wgmma_wait<0>();
        keep(acc);
    }
    if (fault == 38) {  // its own operand overwritten, with a fence, between issue and wait
        wgmma_fence();
        Wgmma<64>::ss<0, 0>(acc, rhs, rhs);
        wgmma_commit();
        if (repaired) wgmma_wait<0>();
        if (repaired) named_sync(6, 256);
        if (t == 128) st_shared(reinterpret_cast<Vec16*>(operand), Vec16{});
        tma_fence();
        wgmma_wait<0>();
        keep(acc);
    }
    for (int i = 0; i < 32; ++i) x += acc[i];
    st_global(result.data + t, x);
}
"""

#: A phase that comes too early is a race for those who look in time and lost on those who do not.
LOST_PHASE = "race, deadlock"
EARLY = "race, uninitialised"
CASES = [
    # fault, name, kind, message
    (0, "a stage is never released", "deadlock", r"mbarrier_wait \(offset 32784: 1 of 8 arriv"),
    (1, "a stage never waited for", LOST_PHASE, ""),
    (39, "a stage overwritten before all have released it", LOST_PHASE, ""),
    (2, "a stage read before it is full", EARLY, "wgmma"),
    (3, "too few bytes expected", "deadlock", "16 bytes more than its mbarrier expects"),
    (4, "too many bytes expected", "deadlock", "0 of 1 arrivals and 16 bytes missing"),
    (5, "the wrong parity", f"{LOST_PHASE}, {EARLY}", ""),
    (6, "released before the product is done", "race", ""),
    (8, "an mbarrier never set up", "uninitialised", "never set up"),
    (9, "an mbarrier used before a barrier", "race", ""),
    (10, "the copy engine not told of an mbarrier", "race", "mbarrier_init_done"),
    (11, "an operand without a fence", "race", "without a tma_fence"),
    (12, "the fence before the write", "race", "without a tma_fence"),
    (13, "a store without a fence", "race", "without a tma_fence"),
    (14, "a stored tile overwritten", "race", "still had to read"),
    (15, "left before the store", "race", "exits before its bulk store"),
    (16, "a bulk group never closed", "race", "exits before its bulk store"),
    (17, "one group too few waited for", "race", ""),
    (18, "a copy not waited for", "race", ""),
    (19, "60 bytes", "misaligned", "multiples of 16"),
    (20, "a tile off its boundary", "misaligned", "multiples of 1024"),
    (40, "an addition off its boundary", "misaligned", "addition of 16 bytes at .* no multiple of 16"),
    (21, "parity 2", "limit", "parity 2"),
    (22, "counts that differ", "divergence", "named barrier 1"),
    (23, "a named barrier missed", "deadlock", r"named barrier 3 \(224 of 256 threads have come\)"),
    (24, "named barrier 0", "limit", "named barrier 0"),
    (25, "handed over without a barrier", "race", ""),
    (26, "one arrival too many", "deadlock", "one arrival too many"),
    (27, "an mbarrier set up twice", "race", "twice"),
    (41, "a named barrier after one thread's store", "divergence", "named barrier .*warp_sync is mis"),
    (42, "a collective after one thread's wait", "divergence", "stmatrix .*warp_sync is missing"),
    (28, "a group that never shrinks", "deadlock", "hold 648 registers a thread together"),
    (29, "more registers than there are", "deadlock", "512 registers a thread together"),
    (30, "grow to less", "limit", "setmaxnreg.inc"),
    (31, "a part of a warpgroup shrinks", "divergence", "some warps only"),
    (32, "left before the product", "race", "wgmma"),
    (33, "a wgmma group never closed", "race", "exits before its wgmma"),
    (34, "descriptors that differ", "divergence", "different descriptors"),
    (35, "an operand outside", "out of bounds", "wgmma"),
    (36, "a swizzle of 32 bytes", "limit", "swizzle mode 3"),
    (38, "an operand overwritten", "race", ""),
]


def run(variant: int, seed: int | None) -> HostBackend:
    tiles = np.ones((1, 1, 5 * 64, 64), np.float16)
    out = np.zeros((1, 1, 128, 64), np.float16)
    result, sums = np.zeros(384, np.float32), np.zeros(64, np.float32)
    backend = HostBackend(seed=seed)
    args: list[Any] = [
        TensorMap(_array("in", tiles, "r"), 64),
        TensorMap(_array("out", out, "rw"), 64),
        from_numpy("row", np.ones(64, np.float32), "r"),
        from_numpy("result", result, "rw"),
        from_numpy("sums", sums, "atomic"),
        np.int32(variant),
    ]
    shared = 4 * 8192 + 64 + 1023
    backend.launch(Kernel(FAULTS, "hopper_faults", (), 384), (1, 1, 1), shared, args)
    return backend


def _array(name: str, x: np.ndarray, access: str) -> Array:
    return Array(name, x.ctypes.data, x.shape, tuple(s // 2 for s in x.strides), "fp16", access, x)


@pytest.mark.parametrize(("fault", "kind", "message"), [pytest.param(f, k, m, id=n) for f, n, k, m in CASES])
def test_a_fault_is_found_and_its_repair_passes(fault: int, kind: str, message: str) -> None:
    kinds = set()
    for seed in (None, 1, 2, 3):
        run(2 * fault + 1, seed)
        with pytest.raises(KernelError, match=message or None) as caught:
            run(2 * fault, seed)
        assert caught.value.kind in kind.split(", "), seed
        kinds.add(caught.value.kind)
        assert "hopper_faults.cu:" in str(caught.value) or fault in (28, 29, 31)
    assert fault != 39 or "race" in kinds


def test_a_deadlock_names_everybody_who_waits_and_for_what() -> None:
    with pytest.raises(KernelError, match="deadlock") as caught:
        run(0, None)
    message = str(caught.value)
    producer = re.search(
        r"lanes 00000001 of warp 0 wait in mbarrier_wait \(offset 32784: 1 of 8 arrivals and 0 "
        r"bytes missing\) at hopper_faults.cu:(\d+)",
        message,
    )
    assert producer, message
    assert "mbarrier_wait(&b->empty[s]" in FAULTS.split("\n")[int(producer[1]) - 1]
    assert re.search(r"threads 128-159 wait in mbarrier_wait \(offset 32768: 1 of 1 arrivals", message)


def test_the_right_pipeline_passes_in_many_orders() -> None:
    for seed in range(20):
        counted = run(1, seed).traffic["hopper_faults"]
        assert counted["in", "read"] == 5 * 8192
