"""The Hopper kernels on the host: right against float64, every byte as predicted, in any order.

Every launch runs with all checks on; where a seed is given, the threads of a block are interleaved
at random, so that a missing barrier is met whichever warp is ahead.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from flash_support import Problem, aligned, check, execute, reference, to_bits, to_float, view
from hopper_runs import BOTH, hold, launch

from analysis.l2.attention import heads_per_group
from analysis.shapes import Tile
from kernels import hopper
from kernels.hopper import BACKWARD_FORMS, FORWARD_FORMS, BackwardForm, ForwardForm
from kernels.host import HostBackend

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
HEAD_DIM = pytest.mark.parametrize("head_dim", [64, 128])


def problem(sizes: tuple[int, int], head_dim: int = 64, dtype: str = "fp16", **more: Any) -> Problem:
    """Two heads that share their keys."""
    fields = {"heads": 2, "kv_heads": 1, "seqlen_q": sizes[0], "seqlen_k": sizes[1], "head_dim": head_dim}
    return Problem(**{**fields, "dtype": dtype, **more})


def in_order(seed: int) -> HostBackend:
    """Threads of a block in an order drawn from the seed; 0: in their own."""
    return HostBackend(seed=seed or None)


# (Nq, Nk): below, at and beyond the tiles' 64, 128, 176 and 192; rows that see nothing; one row
LENGTHS = [(1, 1), (2, 65), (64, 63), (127, 129), (193, 128), (128, 193), (257, 191), (333, 90), (70, 333)]


@pytest.mark.thorough
@CAUSAL
@pytest.mark.parametrize("form", FORWARD_FORMS, ids=lambda f: f.name)
def test_every_form(form: ForwardForm, causal: bool) -> None:
    for seed, sizes in enumerate(LENGTHS):
        p = problem(sizes, form.head_dim, "bf16", causal=causal, seed=seed)
        hold(p, form, backend=in_order(seed))


@CAUSAL
@HEAD_DIM
def test_both_passes(head_dim: int, causal: bool) -> None:
    for seed, sizes in enumerate([(1, 1), (63, 65), (129, 127), (65, 257), (193, 100)]):
        hold(problem(sizes, head_dim, causal=causal, seed=seed), None, BOTH, backend=in_order(seed))


@pytest.mark.thorough
@CAUSAL
@HEAD_DIM
def test_a_deterministic_backward_is_the_same_in_every_order(head_dim: int, causal: bool) -> None:
    """Threads of a block in any order, blocks one after another or side by side: no bit differs."""
    for seed, sizes in enumerate([(1, 1), (63, 65), (200, 300), (300, 400), (300, 170)]):
        p = problem(sizes, head_dim, "bf16", causal=causal, seed=seed, heads=4, kv_heads=2)
        first = hold(p, None, BOTH, deterministic=True, backend=HostBackend(os_threads=1))
        for order, os_threads in ((None, 4), (seed + 1, 3), (seed + 1, 3)):
            backend = HostBackend(seed=order, os_threads=os_threads)
            again = hold(p, None, BOTH, deterministic=True, backend=backend)
            for name in ("dq", "dk", "dv"):
                np.testing.assert_array_equal(again[name], first[name])


def test_the_order_of_turns_shows_in_the_last_bits() -> None:
    """The key tiles are added from the last one to the first: float32 sums of the tiles' dq in that
    order are what the kernel leaves, and the other order is something else."""
    p = Problem(heads=1, seqlen_q=64, seqlen_k=128 * 5, head_dim=128, dtype="fp16", scale=0.5)
    p.data["k"] *= 0.02 * 3.0 ** np.arange(5).repeat(128)[:, None]
    p.data["k"] = to_float(to_bits(p.data["k"], "fp16"), "fp16")
    turns = launch(p, None, BOTH, deterministic=True, backend=HostBackend(os_threads=2))
    # Blocks that run one after another add from the first key tile to the last.
    plain = launch(p, None, BOTH, backend=HostBackend(os_threads=1))
    assert (turns["dq"] != plain["dq"]).any()
    np.testing.assert_allclose(turns["dq"], plain["dq"], rtol=2e-3, atol=2e-3)


@pytest.mark.thorough
@CAUSAL
@pytest.mark.parametrize("form", BACKWARD_FORMS, ids=lambda f: f.name)
def test_every_form_of_the_backward(form: BackwardForm, causal: bool) -> None:
    """Below, at and beyond tiles of 64, 80 and 128 queries; one key tile and several; in any order, and
    in turns where the form can take them."""
    for seed, sizes in enumerate([(1, 1), (80, 128), (81, 129), (79, 63), (200, 257)]):
        p = problem(sizes, form.head_dim, "bf16" if seed % 2 else "fp16", causal=causal, seed=seed)
        for deterministic in (False, True)[: 1 if form.dq_from_registers else 2]:
            hold(p, form, BOTH, deterministic=deterministic, backend=in_order(seed))


def test_tiles_of_the_backward_can_be_asked_for() -> None:
    assert hopper.backward_form(128, causal=False).block_m == 80
    assert hopper.backward_form(128, causal=True).block_m == 64
    p = Problem(seqlen_q=8, seqlen_k=8, head_dim=128)
    known = r"\[\(64, 128\), \(80, 128\)\]"
    with pytest.raises(ValueError, match=rf"no tile \(128, 128\) at head_dim 128; known: {known}"):
        hopper.backward_form(p.head_dim, causal=False, tile=Tile(128, 128))
    with pytest.raises(ValueError, match="form for head_dim 64, arrays with 128"):
        launch(p, BackwardForm(64, 128), ["backward"])
    with pytest.raises(ValueError, match="direct adds dq in no fixed order"):
        launch(p, BackwardForm(128, 64, True), ["backward"], deterministic=True)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False)])
def test_the_gradient_of_lse(head_dim: int, causal: bool) -> None:
    for seed, sizes in enumerate([(1, 1), (130, 70), (65, 200)]):
        p = problem(sizes, head_dim, causal=causal, seed=seed, with_dlse=True)
        for deterministic in (False, True):
            hold(p, None, BOTH, deterministic=deterministic, backend=in_order(seed))


def test_the_gradient_of_lse_of_a_row_that_sees_nothing() -> None:
    """Its lse is -inf; a gradient that is not finite either must not reach the keys."""
    p = Problem(seqlen_q=100, seqlen_k=40, dtype="fp16", causal=True, with_dlse=True)
    p.data["dlse"][:, :, :60] = 0.0
    want = reference(p)
    p.data["dlse"][:, :, :60] = np.nan
    got = launch(p, None, BOTH)
    assert not got["dq"][:, :, :60].any()
    for name in ("dq", "dk", "dv"):
        assert abs(got[name] - want[name]).max() < 5e-3


@pytest.mark.parametrize("algorithm", [hopper.ALGORITHM, hopper.DETERMINISTIC])
def test_only_what_waits_by_itself_is_launched_early(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs before the pass may be anything: its first kernel is an ordinary launch."""
    seen: list[tuple[str, bool]] = []
    real = HostBackend.launch

    def recorded(self: HostBackend, kernel: Any, *args: Any, **options: Any) -> None:
        seen.append((kernel.entry, options.get("pdl", False)))
        real(self, kernel, *args, **options)

    monkeypatch.setattr(HostBackend, "launch", recorded)
    p = Problem(seqlen_q=40, seqlen_k=40, dtype="fp16")
    check(p, execute(p, algorithm=algorithm, pdl=True)[0])
    forward = [("flash_forward_sm90_clear_counter", False), ("flash_forward_sm90_persistent", True)]
    backward = [
        (f"flash_backward_sm90{part}", bool(part != "_preprocess")) for part in ("_preprocess", "", "_postprocess")
    ]
    assert seen == forward + backward
    seen.clear()
    execute(p, algorithm="flash-sm90")
    assert len(seen) == 5
    assert not any(early for _, early in seen)
    # One block a tile has nothing before it to overlap with.
    seen.clear()
    long = Problem(seqlen_q=4100, seqlen_k=40, dtype="fp16", heads=1)
    execute(long, algorithm=algorithm, backward=False, pdl=True)
    assert seen == [("flash_forward_sm90", False)]


def test_batches_and_grouped_heads_each_have_their_place() -> None:
    """Six heads share three; every (batch, head) has values of its own."""
    hold(problem((70, 66), batch=2, heads=6, kv_heads=3, causal=True), None, BOTH, backend=HostBackend(seed=5))


def test_results_do_not_depend_on_the_order_of_threads() -> None:
    """The forward is the same bit for bit; dq is added in any order."""
    p = problem((200, 300), causal=True)
    first = launch(p, None, BOTH)
    for seed in (1, 2, 3):
        again = launch(p, None, BOTH, backend=HostBackend(seed=seed))
        for name in ("out", "lse", "dk", "dv"):
            np.testing.assert_array_equal(again[name], first[name])
        np.testing.assert_allclose(again["dq"], first["dq"], atol=2e-3)


def test_packed_views_in_place() -> None:
    """q, k and v out of one (B, N, 3, H, D) tensor; gradients into another, with a guard around."""
    p = Problem(batch=2, heads=2, seqlen_q=100, seqlen_k=100, dtype="fp16", causal=True)
    memory = {name: aligned((2, 100, 4, 2, 64), "fp16") for name in ("qkv", "grads")}
    arrays, targets = {}, {}
    memory["grads"][...] = 77
    for place, name in enumerate(("q", "k", "v")):
        part = memory["qkv"][:, :, place].transpose(0, 2, 1, 3)
        part[...] = to_bits(p.data[name], "fp16")
        targets["d" + name] = memory["grads"][:, :, place].transpose(0, 2, 1, 3)
        arrays[name], arrays["d" + name] = view(name, part, "fp16"), view("d" + name, targets["d" + name], "fp16")
    memory["qkv"][:, :, 3] = np.nan
    got = launch(p, None, BOTH, arrays=arrays)
    check(p, got | {name: target.astype(np.float64) for name, target in targets.items()})
    assert (memory["grads"][:, :, 3] == 77).all()


def test_large_scores_and_a_late_outlier() -> None:
    """Scores beyond fp16 (64 · 45 · 45 unscaled) and a key that dwarfs all keys met before it."""
    p = Problem(heads=1, seqlen_q=64, seqlen_k=400, dtype="fp16", scale=1.0)
    p.data["k"][:, :, 3] *= 20  # key tiles are walked from the last to the first
    p.data["k"] = to_float(to_bits(p.data["k"], "fp16"), "fp16")
    for form in (FORWARD_FORMS[0], FORWARD_FORMS[1]):
        got, want = launch(p, form), reference(p)
        # A score of 300 has 300 · 2^-24 of absolute error in fp32 before exp.
        assert abs(got["out"] - want["out"]).max() < 3e-3 * np.abs(p.data["v"]).max()
        np.testing.assert_allclose(got["lse"], want["lse"], rtol=2e-6, atol=1e-5)
    p = Problem(heads=1, seqlen_q=1, seqlen_k=4, head_dim=128, dtype="fp16")
    p.data["q"][...] = p.data["k"][...] = 32
    p.data["v"][...] = np.arange(4)[:, None]
    p.data["dout"][...] = 1
    got = launch(p, None, BOTH)
    assert (got["out"] == 1.5).all()
    assert abs(got["lse"] - (131072 / math.sqrt(128) + math.log(4))).max() < 0.01
    np.testing.assert_allclose(got["dv"], 0.25, rtol=1e-3)
    dk = np.array([-135.76, -45.25, 45.25, 135.76])[:, None]
    assert abs(got["dk"] - dk).max() < 0.5
    assert abs(got["dq"]).max() < 0.5


def test_one_key_is_returned_bit_for_bit() -> None:
    p = Problem(heads=1, seqlen_q=1, seqlen_k=1, dtype="fp16")
    got = launch(p, None, BOTH)
    np.testing.assert_array_equal(got["out"], p.data["v"])
    np.testing.assert_array_equal(got["dv"], p.data["dout"])
    assert abs(got["dq"]).max() <= 1e-4
    assert abs(got["dk"]).max() <= 1e-4


def test_refusals_come_before_a_launch() -> None:
    with pytest.raises(ValueError, match="do not cover dtype fp32"):
        launch(Problem(seqlen_q=8, seqlen_k=8, dtype="fp32"))
    with pytest.raises(ValueError, match="form for head_dim 128, arrays with 64"):
        launch(Problem(seqlen_q=8, seqlen_k=8), FORWARD_FORMS[2])
    with pytest.raises(ValueError, match="scale=nan is not finite"):  # no kernel covers that
        hopper.unsupported_reason(dtype="bf16", head_dim=64, scale=math.nan)


def test_heads_run_in_groups_that_fit_in_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 25 MiB: two heads of 8 MiB, one of more than 12.5, all three of the smallest."""
    assert heads_per_group(16, 8 << 20) == 2
    assert heads_per_group(16, 13 << 20) == heads_per_group(16, 1 << 30) == 1
    assert heads_per_group(3, 64) == 3
    # Whatever the size of a group, every tile is computed once: six heads in groups of four.
    p = Problem(batch=1, heads=6, seqlen_q=130, seqlen_k=130, dtype="fp16", causal=True)
    monkeypatch.setattr("analysis.l2.attention.L2_BYTES_FOR_HEADS", 4 * 130 * 64 * 8)
    assert heads_per_group(6, 130 * 64 * 8) == 4
    hold(p, None, BOTH)
