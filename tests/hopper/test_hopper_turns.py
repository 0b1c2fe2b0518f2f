"""Blocks that take turns at adding, with the mistakes that are possible there planted one by one.

Each block adds ones to the same row of sums in its turn. An even variant is broken, the next odd
one is its repair. The host finds every fault whether blocks run one after another or side by side.
"""

from __future__ import annotations

import numpy as np
import pytest
from flash_support import Problem, check, execute
from hopper_runs import BOTH, changed_source, predicted

from analysis.traffic import Traffic
from kernels import hopper
from kernels.hopper import BackwardForm
from kernels.host import HostBackend, KernelError
from kernels.launch import Array, Kernel, from_numpy

TURNS = r"""
#define DTYPE 0
#include "device_sm90.cuh"

extern "C" __global__ void __launch_bounds__(64)
hopper_turns(Tensor1<float> sums, Tensor1<int> turns, int variant) {
    float* const words = reinterpret_cast<float*>(shared_memory());
    const int t = threadIdx.x, block = blockIdx.x, last = gridDim.x - 1;
    const int fault = variant & 1 ? -1 : variant / 2;
    if (t < 16) st_shared(words + t, 1.0f / (block + 1));
    tma_fence();
    block_sync();
    if (t != 0) return;
    const int turn = fault == 1 ? last - block : block;
    if (fault == 4) {
        bulk_add(sums.data, words, 64);
        bulk_commit();
    }
    if (fault != 2) turn_wait(turns.data, turn);
    if (fault == 6) turn_wait(turns.data + 1, 0);
    if (fault != 4) {
        bulk_add(sums.data, words, 64);
        bulk_commit();
    }
    bulk_wait_read<0>();
    if (fault != 3) bulk_wait<0>();
    if (fault == 5) turn_pass(turns.data, turn + 1);
    if (fault == 7) turn_pass(turns.data + 1, 0);
    if (fault != 0) turn_pass(turns.data, turn);
}
"""
CASES = [
    (0, "a turn never passed on", "deadlock", "exits without passing on the turn"),
    (1, "the last block first", "deadlock", r"for turn \d of a counter that shows \d, and every bl"),
    (2, "not waited for", "race", "not waited for by the thread"),
    (3, "passed on before the addition is complete", "race", "turn_pass.*bulk_wait is missing"),
    (4, "added before the turn", "race", "turn_wait.*bulk_wait is missing"),
    (5, "somebody else's turn passed on", "race", "of turn 1 of a counter that shows 0"),
    (6, "two turns at a time", "deadlock", "by a thread that holds the turn"),
    (7, "another counter", "race", "of turn 0 of a counter that shows 0, not waited for"),
]
BLOCKS = 6
KERNEL = Kernel(TURNS, "hopper_turns", (), 64)


def run(
    variant: int, seed: int | None = None, os_threads: int = 1, turns: Array | None = None
) -> tuple[np.ndarray, HostBackend]:
    sums, zeros = np.zeros(16, np.float32), np.zeros(2, np.int32)
    backend = HostBackend(seed=seed, os_threads=os_threads)
    counters = turns or from_numpy("turns", zeros, "atomic")
    args = [from_numpy("sums", sums, "atomic"), counters, np.int32(variant)]
    backend.launch(KERNEL, (BLOCKS, 1, 1), 64, args)
    return sums, backend


@pytest.mark.parametrize(("fault", "kind", "message"), [pytest.param(f, k, m, id=n) for f, n, k, m in CASES])
@pytest.mark.parametrize("os_threads", [1, 4])
def test_a_fault_is_found_and_its_repair_passes(fault: int, kind: str, message: str, os_threads: int) -> None:
    for seed in (None, 1, 2, 3):
        run(2 * fault + 1, seed, os_threads)
        with pytest.raises(KernelError, match=message) as caught:
            run(2 * fault, seed, os_threads)
        assert caught.value.kind == kind
        assert "hopper_turns.cu:" in str(caught.value)


def test_sums_are_those_of_the_turns_and_a_wait_is_one_read() -> None:
    expected = np.float32(0)
    for block in range(BLOCKS):
        expected += np.float32(1) / np.float32(block + 1)
    for seed in range(10):
        sums, backend = run(1, seed, os_threads=1 + seed % 4)
        np.testing.assert_array_equal(sums, np.full(16, expected))
        assert backend.traffic["hopper_turns"] == {
            ("turns", "read"): 4 * BLOCKS,
            ("turns", "write"): 4 * BLOCKS,
            ("sums", "atomic"): 64 * BLOCKS,
        }


def test_counters_are_shared_by_blocks_and_set_before() -> None:
    with pytest.raises(KernelError, match="never written") as caught:
        run(1, turns=HostBackend().empty("turns", (2,), "int32").with_access("atomic"))
    assert caught.value.kind == "uninitialised"
    with pytest.raises(KernelError, match="passed as read-write"):
        run(1, turns=from_numpy("turns", np.zeros(2, np.int32), "rw"))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("turn_pass(turns.data + at, turn);", "", "without passing on the turn"),
        ("if (lane == 0) turn_wait(turns.data + at, turn);", "", "not waited for by the thread"),
        ("bulk_wait<0>();  // until", "// until", "turn_pass.*bulk_wait is missing"),
        ("DETERMINISTIC ? key_tiles - 1 - place : place", "place", "every block before this one"),
        ("turns.data + at, turn)", "turns.data + tile, turn)", "every block before this one"),
        ("warp_sync();  // a named barrier wants", "// it wants", "barrier .*warp_sync is missing"),
    ],
    ids=[
        "not passed on",
        "not waited for",
        "passed on early",
        "blocks in another order",
        "the turns of another head",
        "one thread ahead of its warp",
    ],
)
def test_mistakes_in_the_backward_are_found(
    right: str, wrong: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_of = BackwardForm.kernel

    def mistaken(self: BackwardForm, part: str, dtype: str, causal: bool, **options: bool) -> Kernel:
        kernel = kernel_of(self, part, dtype, causal, **options)
        return kernel if part else changed_source(kernel, (right, wrong))

    monkeypatch.setattr(BackwardForm, "kernel", mistaken)
    p = Problem(heads=2, seqlen_q=200, seqlen_k=300, dtype="bf16", causal=True)
    with pytest.raises(KernelError, match=message):
        # Blocks one after another: what is found does not depend on who is faster.
        execute(p, algorithm="flash-sm90-deterministic", backend=HostBackend(os_threads=1))


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_turns_in_kernels_that_start_early(head_dim: int, causal: bool) -> None:
    """The bits of the ordinary launches whatever the order, gradients right, bytes as predicted."""
    p = Problem(
        heads=4, kv_heads=2, seqlen_q=300, seqlen_k=400, head_dim=head_dim, dtype="bf16", causal=causal, with_dlse=True
    )
    plain, _ = execute(p, algorithm=hopper.DETERMINISTIC, backend=HostBackend(os_threads=1))
    check(p, plain)
    want = predicted(p, None, BOTH, deterministic=True)
    assert want.kernels["flash_backward_sm90"]["turns", "read"] > 0
    for seed, os_threads in ((None, 1), (1, 1), (2, 3), (3, 4), (4, 4)):
        backend = HostBackend(seed=seed, os_threads=os_threads)
        got, counted = execute(p, algorithm=hopper.DETERMINISTIC, backend=backend, pdl=True)
        check(p, got)
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(got[name], plain[name], err_msg=name)
        assert Traffic(counted).kernels == want.kernels
