"""CUDA's own words in own kernels: barriers, masks of lanes, atomics and types of arrays."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernels.host import HostBackend, KernelError
from kernels.launch import Argument, Kernel, from_numpy
from tests.support.host_support import one_kernel

THREADS = 128
BARRIERS = r"""
#include "counted.cuh"
inline void twice() { __syncthreads(); __syncthreads(); }
extern "C" __global__ void barriers(Global<float> y, int variant) {
    const int t = threadIdx.x;
    switch (variant) {
        case 0: if (t % 2 == 0) __syncthreads(); __syncthreads(); break;
        case 1: for (int k = 0; k <= t % 3; ++k) __syncthreads(); __syncthreads(); break;
        case 2: for (int k = 0; k < 4; ++k) { if (t > 20 * k) break; __syncthreads(); }
                __syncthreads(); break;
        case 3: if (t == 77) twice(); else __syncthreads(); break;
        case 4: if (t < 64) __syncthreads(); else if (t < 96) __syncthreads();
                else { __shfl_sync(1u << t % 32, 1, 0); __syncthreads(); } break;
        case 5: if (t != 5) __syncthreads(); else __syncwarp(); break;
        case 6: for (int k = 0; k < 5; ++k) __syncthreads(); twice(); break;
        case 7: if (t >= 40) break; __syncthreads(); break;  // the others have ended
        case 8: for (int k = 0; k < 3; ++k) twice(); break;
    }
    y[t] = t;
}
"""


def run_barriers(variant: int, seed: int | None) -> None:
    y = np.zeros(THREADS, np.float32)
    kernel = Kernel(BARRIERS, "barriers", (), THREADS)
    args: list[Argument] = [from_numpy("y", y, "w"), np.int32(variant)]
    HostBackend(seed=seed).launch(kernel, (1, 1, 1), 0, args)
    np.testing.assert_array_equal(y, np.arange(THREADS))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("variant", range(6))
def test_a_barrier_that_some_threads_miss(variant: int, seed: int | None) -> None:
    with pytest.raises(KernelError) as caught:
        run_barriers(variant, seed)
    place = caught.value
    assert (place.kernel, place.kind) == ("barriers", "deadlock" if variant == 5 else "divergence")
    assert re.search(r"__syncthreads at barriers\.cu:\d+ is missing thread", str(place))


@pytest.mark.parametrize(
    ("variant", "line", "missing"),
    [
        (0, "case 0", "thread 1, 3, 5, 7, 9, 11, 13, 15 and others: 64 threads in all"),
        (4, "case 4", "thread 64-127"),
        (5, "case 5", "thread 5;"),
    ],
)
def test_the_line_and_the_missing_threads_are_named(variant: int, line: str, missing: str) -> None:
    number = next(i for i, text in enumerate(BARRIERS.splitlines(), 1) if line in text)
    with pytest.raises(KernelError) as caught:
        run_barriers(variant, None)
    message = f"__syncthreads at barriers.cu:{number} is missing {missing}"
    assert message in str(caught.value)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("variant", [6, 8])
def test_barriers_that_all_threads_reach(variant: int, seed: int | None) -> None:
    run_barriers(variant, seed)


@pytest.mark.parametrize("seed", [None, 3])
def test_threads_that_have_ended_are_not_waited_for(seed: int | None) -> None:
    run_barriers(7, seed)


MASKS = r"""
#include "counted.cuh"
@ENTRY@
ENTRY(block_sum) {  // the last step among four lanes, the others have gone on
    Shared<float> partial = dynamic_shared<float>();
    float v = x[threadIdx.x];
    for (int step = 16; step; step /= 2) v += __shfl_down_sync(~0u, v, step);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < 4) {
        v = partial[threadIdx.x];
        v += __shfl_down_sync(0xfu, v, 2);
        v += __shfl_down_sync(0xfu, v, 1);
        if (threadIdx.x == 0) partial[0] = v;
    }
    __syncthreads();
    y[threadIdx.x] = partial[0];
}
ENTRY(nested) {  // halves, then quarters of one half, each at its own pace
    const int lane = threadIdx.x % 32;
    float v = x[threadIdx.x];
    if (lane < 16) {
        v += __shfl_xor_sync(0x0000ffffu, v, 8);
        if (lane < 8) {
            for (int k = 0; k < 3; ++k) v = __shfl_xor_sync(0x000000ffu, v, 1);
        } else {
            v += __shfl_xor_sync(0x0000ff00u, v, 4);
        }
        __syncwarp(0x0000ffffu);
    } else if (lane % 2) {
        v = __shfl_sync(0xaaaa0000u, v, 31);
    } else {
        v = __shfl_sync(0x55550000u, v, 16);
    }
    y[threadIdx.x] = __shfl_sync(~0u, v, lane ^ 1);
}
ENTRY(segments) {
    const int t = threadIdx.x;
    const float v = x[t];
    y[t] = __shfl_up_sync(~0u, v, 3, 8);
    y[128 + t] = __shfl_down_sync(~0u, v, 3, 8);
    y[256 + t] = __shfl_xor_sync(~0u, v, 12, 8);
    y[384 + t] = __shfl_sync(~0u, v, 13, 8);
    y[512 + t] = float(__shfl_down_sync(~0u, 1e300 * double(v), 1) / 1e300);
}
ENTRY(votes) {
    const int t = threadIdx.x, lane = t % 32;
    if (lane < 20) {
        const unsigned mask = 0xfffffu;
        y[t] = __ballot_sync(mask, lane % 3 == 0) + 0.25f * __all_sync(mask, lane < 20)
             + 0.125f * __any_sync(mask, lane == 20);
    } else {
        y[t] = 0;
    }
}
ENTRY(two_places) {  // the same word and mask in both branches
    float v = x[threadIdx.x];
    if (threadIdx.x % 2)
        v += __shfl_xor_sync(~0u, v, 1);
    else
        v += __shfl_xor_sync(~0u, v, 1);
    y[threadIdx.x] = v;
}
ENTRY(after_some_ended) {
    y[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x % 32 > 9) return;
    y[threadIdx.x] = __shfl_sync(~0u, x[threadIdx.x] + 0.f, 9);
}
ENTRY(not_named) { y[threadIdx.x] = __shfl_sync(0xfu, 1.f, 0); }
ENTRY(never_comes) {
    if (threadIdx.x % 32 != 6) __shfl_sync(0xffu & (threadIdx.x % 32 < 8 ? ~0u : 0u)
                                           | 1u << threadIdx.x % 32, 1.f, 0);
    else __syncthreads();
}
ENTRY(other_word) {
    const float v = 1.f;
    if (threadIdx.x % 2) __shfl_xor_sync(~0u, v, 1);
    else __ballot_sync(~0u, 1);
}
"""
SOURCE, ENTRIES = one_kernel(MASKS, "masks", "Global<const float> x, Global<float> y")
X = np.arange(THREADS, dtype=np.float32)


def run_masks(entry: str, seed: int | None = None, size: int = THREADS) -> np.ndarray:
    y = np.zeros(size, np.float32)
    args = [from_numpy("x", X, "r"), from_numpy("y", y, "rw"), np.int32(ENTRIES.index(entry))]
    HostBackend(seed=seed).launch(Kernel(SOURCE, "masks", (), THREADS), (1, 1, 1), 64, args)
    return y


@pytest.mark.parametrize("seed", [None, 3])
def test_a_shuffle_waits_for_the_lanes_of_its_mask_and_no_others(seed: int | None) -> None:
    np.testing.assert_array_equal(run_masks("block_sum", seed), X.sum())
    lane = np.arange(THREADS) % 32
    pair = X + X.reshape(-1, 2, 8)[:, ::-1].reshape(-1)
    four = pair + pair.reshape(-1, 2, 4)[:, ::-1].reshape(-1)
    swapped = pair.reshape(-1, 2)[:, ::-1].reshape(-1)
    warp = X - lane
    rest = np.where(lane % 2, warp + 31, warp + 16)
    expected = np.select([lane < 8, lane < 16], [swapped, four], rest)
    expected = expected.reshape(-1, 2)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(run_masks("nested", seed), expected)


def test_shuffles_of_segments() -> None:
    up, down, xor, one, wide = run_masks("segments", size=5 * THREADS).reshape(5, THREADS)
    t = np.arange(THREADS)
    place = t % 8
    np.testing.assert_array_equal(up, np.where(place >= 3, t - 3, t))
    np.testing.assert_array_equal(down, np.where(place < 5, t + 3, t))
    # As PTX has it: lanes of earlier segments may be taken from.
    np.testing.assert_array_equal(xor, np.where(t % 32 ^ 12 < t % 32 - place + 8, t ^ 12, t))
    np.testing.assert_array_equal(one, t - place + 5)
    np.testing.assert_allclose(wide, np.where(t % 32 < 31, t + 1, t), rtol=1e-6)


def test_votes() -> None:
    ballot = sum(1 << lane for lane in range(0, 20, 3))
    expected = np.where(np.arange(THREADS) % 32 < 20, ballot + 0.25, 0)
    np.testing.assert_array_equal(run_masks("votes"), expected)


@pytest.mark.parametrize("seed", [None, 3])
def test_the_same_word_at_two_places(seed: int | None) -> None:
    t = np.arange(THREADS)
    np.testing.assert_array_equal(run_masks("two_places", seed), t + (t ^ 1))


@pytest.mark.parametrize("seed", [None, 3])
def test_lanes_that_have_ended_are_not_waited_for_by_a_shuffle(seed: int | None) -> None:
    t = np.arange(THREADS)
    expected = np.where(t % 32 <= 9, t - t % 32 + 9, t)
    np.testing.assert_array_equal(run_masks("after_some_ended", seed), expected)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    ("entry", "kind", "words"),
    [
        ("not_named", "divergence", "which the mask 0000000f does not name"),
        ("never_comes", "deadlock", "__shfl_sync with mask 000000ff (lanes 00000040 have not come)"),
        ("other_word", "deadlock", "__ballot_sync with mask ffffffff (lanes aaaaaaaa"),
    ],
)
def test_masks_that_are_wrong(entry: str, kind: str, words: str, seed: int | None) -> None:
    with pytest.raises(KernelError) as caught:
        run_masks(entry, seed)
    assert caught.value.kind == kind
    assert words in str(caught.value)


ATOMICS = r"""
#include "counted.cuh"
extern "C" __global__ void atomics(Global<int> i, Global<unsigned> u, Global<uint64> ul, Global<int64> l,
                                   Global<float> f, Global<double> d, Global<double> old, int variant) {
    const int t = threadIdx.x;
    double seen = 0;
    switch (variant) {
        case 0: seen = atomicAdd(i, 2); break;
        case 1: seen = atomicAdd(&d[0], 0.5); break;
        case 2: seen = atomicAdd(f, 0.5f); break;
        case 3: seen = atomicSub(u, 1u); break;
        case 4: seen = double(atomicExch(ul, uint64(t))); break;
        case 5: seen = double(atomicMax(l, int64(t))); break;
        case 6: seen = atomicMin(i, -t); break;
        case 7: seen = atomicOr(u, 1u << t); break;
        case 8: seen = atomicInc(u, 9u); break;
        case 9: seen = atomicDec(u, 9u); break;
        case 10: seen = atomicCAS(i, 7, 50 + t); break;
    }
    old[t] = seen;
}
"""
TYPES = {"i": np.int32, "u": np.uint32, "ul": np.uint64, "l": np.int64, "f": np.float32, "d": np.float64}
T = list(range(32))


@pytest.mark.parametrize(
    ("variant", "name", "start", "left", "seen"),
    [
        (0, "i", 5, 69, [5 + 2 * t for t in T]),
        (1, "d", 2, 18, [2 + t / 2 for t in T]),
        (2, "f", 2, 18, [2 + t / 2 for t in T]),
        (3, "u", 40, 8, [40 - t for t in T]),
        (4, "ul", 99, 31, [99, *T[:-1]]),
        (5, "l", 9, 31, [max(9, t - 1) for t in T]),
        (6, "i", -3, -31, [min(-3, 1 - t) for t in T]),
        (7, "u", 0, 2**32 - 1, [2**t - 1 for t in T]),
        (8, "u", 0, 2, [t % 10 for t in T]),
        (9, "u", 0, 8, [-t % 10 for t in T]),
        (10, "i", 7, 50, [7] + 31 * [50]),
    ],
    ids=["add", "add double", "add float", "sub", "exch", "max", "min", "or", "inc", "dec", "cas"],
)
def test_atomics_give_the_old_value(variant: int, name: str, start: int, left: float, seen: list[float]) -> None:
    """What is left, and the values that the threads saw, by thread; they run in their order."""
    memory = {n: np.full(1, start if n == name else 0, kind) for n, kind in TYPES.items()}
    old = np.zeros(32, np.float64)
    args: list[Argument] = [from_numpy(n, x, "atomic") for n, x in memory.items()]
    args += [from_numpy("old", old, "w"), np.int32(variant)]
    HostBackend().launch(Kernel(ATOMICS, "atomics", (), 32), (1, 1, 1), 64, args)
    assert (memory[name][0], old.tolist()) == (left, seen)


@pytest.mark.parametrize(
    ("call", "element", "words"),
    [
        ("atomicAdd(x, 1)", "short", "atomicAdd takes int, unsigned, unsigned long long, float"),
        ("atomicAdd(dynamic_shared<int>(), 1)", "int", "on shared memory is not done"),
    ],
)
def test_atomics_that_are_refused_in_words(call: str, element: str, words: str) -> None:
    source = f"""#include "counted.cuh"
    extern "C" __global__ void f(Global<{element}> x) {{ {call}; }}"""
    x = np.zeros(1, np.int16 if element == "short" else np.int32)
    with pytest.raises(Exception, match=words):
        HostBackend().launch(Kernel(source, "f", (), 32), (1, 1, 1), 64, [from_numpy("x", x, "atomic")])


OTHERS = {"float64": "double", "int8": "signed char", "int16": "short", "uint8": "uint8", "uint32": "uint32"}
OTHERS["uint64"] = "uint64"


def test_arrays_of_other_types() -> None:
    taken = ", ".join(f"Global<const {c}> x{i}, Global<{c}> y{i}" for i, c in enumerate(OTHERS.values()))
    added = " ".join(f"y{i}[t] = x{i}[t] + 1;" for i in range(len(OTHERS)))
    source = f"""#include "counted.cuh"
    extern "C" __global__ void f({taken}) {{ const int t = threadIdx.x; {added} }}"""
    arrays = [(np.arange(32).astype(dtype), np.zeros(32, dtype)) for dtype in OTHERS]
    backend, args = HostBackend(), list[Argument]()
    for i, (x, y) in enumerate(arrays):
        args += [from_numpy(f"x{i}", x, "r"), from_numpy(f"y{i}", y, "w")]
    backend.launch(Kernel(source, "f", (), 32), (1, 1, 1), 0, args)
    for i, (x, y) in enumerate(arrays):
        np.testing.assert_array_equal(y, x + 1)
        assert backend.traffic["f"][f"x{i}", "read"] == backend.traffic["f"][f"y{i}", "write"] == x.nbytes


def test_other_arrays_are_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"x: a NumPy array of complex64 .* only those of .*float64"):
        from_numpy("x", np.zeros(1, np.complex64), "r")
