"""The Hopper kernels on the host: right against float64, every byte as predicted, in any order.

Every launch runs with all checks on; where a seed is given, the threads of a block are interleaved
at random, so that a missing barrier is met whichever warp is ahead.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from flash_support import Problem, aligned, check, reference, to_bits, to_float, view
from flash_support import execute as shared_execute

from analysis.l2.attention import heads_per_group
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import Traffic, predict_traffic
from kernels import hopper
from kernels.hopper import BACKWARD_FORMS, FORWARD_FORMS, BackwardForm, ForwardForm
from kernels.host import HostBackend
from kernels.launch import Array

#: Every form of the backward, in any order and in turns where it can take them.
BACKWARDS = pytest.mark.parametrize(
    ("form", "deterministic"),
    [
        pytest.param(form, turns, id=f"{form.name}{', in turns' * turns}")
        for form in BACKWARD_FORMS
        for turns in (False, True)
        if not (turns and form.dq_from_registers)
    ],
)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])


def execute(
    p: Problem,
    form: ForwardForm | None = None,
    *,
    seed: int | None = None,
    backward: bool = False,
    backward_form: BackwardForm | None = None,
    deterministic: bool = False,
    os_threads: int | None = None,
    arrays: dict[str, Array] | None = None,
) -> tuple[dict[str, np.ndarray], Traffic]:
    """Results as float64, and what was counted."""
    given: dict[str, Array] = {}
    memory: dict[str, np.ndarray] = {}
    likes = {"out": "q", "dq": "q", "dk": "k", "dv": "v"}
    for name in ("q", "k", "v", "dout", *likes):
        memory[name] = aligned(p.data[likes.get(name, name)].shape, p.dtype)
        memory[name][...] = to_bits(p.data[name] if name not in likes else np.full(memory[name].shape, np.nan), p.dtype)
        given[name] = view(name, memory[name], p.dtype)
    given |= arrays or {}
    lse = aligned(p.data["q"].shape[:3], "fp32")
    stats = view("lse", lse, "fp32")
    backend = HostBackend(seed=seed, os_threads=os_threads)
    options: dict[str, Any] = {"scale": p.scale, "causal": p.causal}
    q, k, v, out, dout = (given[name] for name in ("q", "k", "v", "out", "dout"))
    hopper.forward(backend, q, k, v, out, stats, form=form, **options)
    names = ["out"]
    if backward:
        gradients = [given[name] for name in ("dq", "dk", "dv")]
        if backward_form is not None:
            options["form"] = backward_form
        if p.with_dlse:
            options["dlse"] = view("dlse", p.data["dlse"].astype(np.float32), "fp32")
        hopper.backward(backend, q, k, v, out, dout, stats, *gradients, deterministic=deterministic, **options)
        names += ["dq", "dk", "dv"]
    results = {name: to_float(memory[name], p.dtype) for name in names}
    return results | {"lse": lse.astype(np.float64)}, Traffic(backend.traffic)


def predicted(
    p: Problem,
    form: ForwardForm | None,
    backward: bool,
    deterministic: bool = False,
    backward_form: BackwardForm | None = None,
) -> Traffic:
    shape = AttentionShape(p.batch, p.heads, p.seqlen_q, p.seqlen_k, p.head_dim, p.kv_heads, p.dtype, p.causal)
    form = form or hopper.forward_form(p.head_dim, p.causal, p.seqlen_q)
    total = predict_traffic("flash-sm90", shape, form.tile, "forward", persistent=form.persistent)
    if backward:
        tile = (backward_form or hopper.backward_form(p.head_dim, p.causal)).tile
        algorithm = hopper.DETERMINISTIC if deterministic else hopper.ALGORITHM
        total += predict_traffic(algorithm, shape, tile, "backward", lse_gradient=p.with_dlse)
    return total


def hold(p: Problem, form: ForwardForm | None = None, **options: Any) -> None:
    """Values to float64 and bytes to the prediction."""
    got, counted = execute(p, form, **options)
    check(p, got)
    asked = [options.get(name, False) for name in ("backward", "deterministic")]
    wanted = predicted(p, form, *asked, options.get("backward_form"))
    assert counted.kernels == wanted.kernels


# (Nq, Nk): below, at and beyond the tiles' 64, 128, 176 and 192; rows that see nothing; one row
LENGTHS = [(1, 1), (2, 65), (64, 63), (127, 129), (193, 128), (128, 193), (257, 191), (333, 90), (70, 333)]


@pytest.mark.thorough
@CAUSAL
@pytest.mark.parametrize("form", FORWARD_FORMS, ids=lambda f: f.name)
def test_every_form(form: ForwardForm, causal: bool) -> None:
    for seed, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        p = Problem(
            heads=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=form.head_dim,
            dtype="bf16",
            causal=causal,
            seed=seed,
        )
        hold(p, form, seed=seed or None)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_both_passes(head_dim: int, causal: bool) -> None:
    lengths = [(1, 1), (63, 65), (129, 127), (65, 257), (193, 100)]
    for seed, (seqlen_q, seqlen_k) in enumerate(lengths):
        p = Problem(
            heads=2,
            kv_heads=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            dtype="fp16",
            causal=causal,
            seed=seed,
        )
        hold(p, seed=seed or None, backward=True)


@pytest.mark.thorough
@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_deterministic_backward_is_the_same_in_every_order(head_dim: int, causal: bool) -> None:
    """Threads of a block in any order, blocks one after another or side by side: no bit differs."""
    lengths = [(1, 1), (63, 65), (200, 300), (300, 400), (300, 170)]
    for seed, (seqlen_q, seqlen_k) in enumerate(lengths):
        p = Problem(
            heads=4,
            kv_heads=2,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            dtype="bf16",
            causal=causal,
            seed=seed,
        )
        first, _ = execute(p, backward=True, deterministic=True, os_threads=1)
        check(p, first)
        for order, os_threads in ((None, 4), (seed + 1, 3), (seed + 1, 3)):
            options = {"backward": True, "deterministic": True, "os_threads": os_threads}
            again, counted = execute(p, seed=order, **options)
            assert counted.kernels == predicted(p, None, True, True).kernels
            for name in ("dq", "dk", "dv"):
                np.testing.assert_array_equal(again[name], first[name])


def test_the_order_of_turns_shows_in_the_last_bits() -> None:
    """The key tiles are added from the last one to the first: float32 sums of the tiles' dq in that
    order are what the kernel leaves, and the other order is something else."""
    p = Problem(heads=1, seqlen_q=64, seqlen_k=128 * 5, head_dim=128, dtype="fp16", scale=0.5)
    p.data["k"] *= 0.02 * 3.0 ** np.arange(5).repeat(128)[:, None]
    p.data["k"] = to_float(to_bits(p.data["k"], "fp16"), "fp16")
    turns, _ = execute(p, backward=True, deterministic=True, os_threads=2)
    # Blocks that run one after another add from the first key tile to the last.
    plain, _ = execute(p, backward=True, os_threads=1)
    assert (turns["dq"] != plain["dq"]).any()
    np.testing.assert_allclose(turns["dq"], plain["dq"], rtol=2e-3, atol=2e-3)


@pytest.mark.thorough
@CAUSAL
@BACKWARDS
def test_every_form_of_the_backward(form: BackwardForm, deterministic: bool, causal: bool) -> None:
    """Below, at and beyond tiles of 64, 80 and 128 queries; one key tile and several."""
    lengths = [(1, 1), (80, 128), (81, 129), (79, 63), (200, 257)]
    for seed, (seqlen_q, seqlen_k) in enumerate(lengths):
        p = Problem(
            heads=2,
            kv_heads=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=form.head_dim,
            dtype="bf16" if seed % 2 else "fp16",
            causal=causal,
            seed=seed,
        )
        hold(p, seed=seed or None, backward=True, backward_form=form, deterministic=deterministic)


def test_tiles_of_the_backward_can_be_asked_for() -> None:
    assert hopper.backward_form(128, causal=False).block_m == 80
    assert hopper.backward_form(128, causal=True).block_m == 64
    p = Problem(seqlen_q=8, seqlen_k=8, head_dim=128)
    known = r"\[\(64, 128\), \(80, 128\)\]"
    with pytest.raises(ValueError, match=rf"no tile \(128, 128\) at head_dim 128; known: {known}"):
        hopper.backward_form(p.head_dim, causal=False, tile=Tile(128, 128))
    with pytest.raises(ValueError, match="form for head_dim 64, arrays with 128"):
        execute(p, backward=True, backward_form=BackwardForm(64, 128))
    with pytest.raises(ValueError, match="direct adds dq in no fixed order"):
        execute(p, backward=True, backward_form=BackwardForm(128, 64, True), deterministic=True)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_gradient_of_lse(head_dim: int, causal: bool) -> None:
    for seed, (seqlen_q, seqlen_k) in enumerate([(1, 1), (130, 70), (65, 200)]):
        p = Problem(
            heads=2,
            kv_heads=1,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            dtype="fp16",
            causal=causal,
            with_dlse=True,
            seed=seed,
        )
        for deterministic in (False, True):
            hold(p, seed=seed or None, backward=True, deterministic=deterministic)


def test_the_gradient_of_lse_of_a_row_that_sees_nothing() -> None:
    """Its lse is -inf; a gradient that is not finite either must not reach the keys."""
    p = Problem(seqlen_q=100, seqlen_k=40, dtype="fp16", causal=True, with_dlse=True)
    p.data["dlse"][:, :, :60] = 0.0
    want = reference(p)
    p.data["dlse"][:, :, :60] = np.nan
    got, _ = execute(p, backward=True)
    assert not got["dq"][:, :, :60].any()
    for name in ("dq", "dk", "dv"):
        assert abs(got[name] - want[name]).max() < 5e-3


@pytest.mark.parametrize("algorithm", [hopper.ALGORITHM, hopper.DETERMINISTIC])
def test_only_what_waits_by_itself_is_launched_early(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs before the pass may be anything: its first kernel is an ordinary launch."""
    seen: list[tuple[str, bool]] = []
    launch = HostBackend.launch

    def recorded(self: HostBackend, kernel: Any, *args: Any, **options: Any) -> None:
        seen.append((kernel.entry, options.get("pdl", False)))
        launch(self, kernel, *args, **options)

    monkeypatch.setattr(HostBackend, "launch", recorded)
    p = Problem(seqlen_q=40, seqlen_k=40, dtype="fp16")
    values, _ = shared_execute(p, algorithm=algorithm, pdl=True)
    check(p, values)
    assert seen[-3:] == [
        ("flash_backward_sm90_preprocess", False),
        ("flash_backward_sm90", True),
        ("flash_backward_sm90_postprocess", True),
    ]
    assert seen[:-3] == [("flash_forward_sm90_clear_counter", False), ("flash_forward_sm90_persistent", True)]
    seen.clear()
    shared_execute(p, algorithm="flash-sm90")
    assert len(seen) == 5
    assert not any(early for _, early in seen)
    # One block a tile has nothing before it to overlap with.
    long = Problem(seqlen_q=4100, seqlen_k=40, dtype="fp16", heads=1)
    seen.clear()
    shared_execute(long, algorithm=algorithm, backward=False, pdl=True)
    assert seen == [("flash_forward_sm90", False)]


def test_both_passes_in_bf16() -> None:
    hold(Problem(batch=2, seqlen_q=130, seqlen_k=200, dtype="bf16", causal=True), backward=True)


def test_batches_and_grouped_heads_each_have_their_place() -> None:
    """Six heads share three; every (batch, head) has values of its own."""
    p = Problem(batch=2, heads=6, kv_heads=3, seqlen_q=70, seqlen_k=66, dtype="fp16", causal=True)
    hold(p, backward=True, seed=5)


def test_results_do_not_depend_on_the_order_of_threads() -> None:
    """The forward is the same bit for bit; dq is added in any order."""
    p = Problem(heads=2, seqlen_q=200, seqlen_k=300, dtype="fp16", causal=True)
    first, _ = execute(p, backward=True)
    for seed in (1, 2, 3):
        again, _ = execute(p, backward=True, seed=seed)
        for name in ("out", "lse", "dk", "dv"):
            np.testing.assert_array_equal(again[name], first[name])
        np.testing.assert_allclose(again["dq"], first["dq"], atol=2e-3)


def test_rows_that_see_nothing() -> None:
    p = Problem(heads=1, seqlen_q=200, seqlen_k=70, dtype="fp16", causal=True)
    got, _ = execute(p, backward=True, seed=1)
    blind = 200 - 70
    assert not got["out"][:, :, :blind].any()
    assert not got["dq"][:, :, :blind].any()
    assert (got["lse"][:, :, :blind] == -np.inf).all()
    check(p, got)


def test_packed_views_in_place() -> None:
    """q, k and v out of one (B, N, 3, H, D) tensor; gradients into another, with a guard around."""
    p = Problem(batch=2, heads=2, seqlen_q=100, seqlen_k=100, dtype="fp16", causal=True)
    memory = {name: aligned((2, 100, 4, 2, 64), "fp16") for name in ("qkv", "grads")}
    arrays = {}
    memory["grads"][...] = 77
    for place, name in enumerate(("q", "k", "v")):
        part = memory["qkv"][:, :, place].transpose(0, 2, 1, 3)
        part[...] = to_bits(p.data[name], "fp16")
        arrays[name] = view(name, part, "fp16")
        target = memory["grads"][:, :, place].transpose(0, 2, 1, 3)
        arrays["d" + name] = view("d" + name, target, "fp16")
    memory["qkv"][:, :, 3] = np.nan
    got, _ = execute(p, backward=True, arrays=arrays)
    for place, name in enumerate(("dq", "dk", "dv")):
        got[name] = memory["grads"][:, :, place].transpose(0, 2, 1, 3).astype(np.float64)
    check(p, got)
    assert (memory["grads"][:, :, 3] == 77).all()


def test_large_scores_and_a_late_outlier() -> None:
    """Scores beyond fp16 (64 · 45 · 45 unscaled) and a key that dwarfs all keys met before it."""
    p = Problem(heads=1, seqlen_q=64, seqlen_k=400, dtype="fp16", scale=1.0)
    p.data["k"][:, :, 3] *= 20  # key tiles are walked from the last to the first
    p.data["k"] = to_float(to_bits(p.data["k"], "fp16"), "fp16")
    for form in (FORWARD_FORMS[0], FORWARD_FORMS[1]):
        got, _ = execute(p, form)
        want = reference(p)
        # A score of 300 has 300 · 2^-24 of absolute error in fp32 before exp.
        assert abs(got["out"] - want["out"]).max() < 3e-3 * np.abs(p.data["v"]).max()
        np.testing.assert_allclose(got["lse"], want["lse"], rtol=2e-6, atol=1e-5)
    p = Problem(heads=1, seqlen_q=1, seqlen_k=4, head_dim=128, dtype="fp16")
    p.data["q"][...] = p.data["k"][...] = 32
    p.data["v"][...] = np.arange(4)[:, None]
    p.data["dout"][...] = 1
    got, _ = execute(p, backward=True)
    assert (got["out"] == 1.5).all()
    assert abs(got["lse"] - (131072 / math.sqrt(128) + math.log(4))).max() < 0.01
    np.testing.assert_allclose(got["dv"], 0.25, rtol=1e-3)
    dk = np.array([-135.76, -45.25, 45.25, 135.76])[:, None]
    assert abs(got["dk"] - dk).max() < 0.5
    assert abs(got["dq"]).max() < 0.5


def test_one_key_is_returned_bit_for_bit() -> None:
    p = Problem(heads=1, seqlen_q=1, seqlen_k=1, dtype="fp16")
    got, _ = execute(p, backward=True)
    np.testing.assert_array_equal(got["out"], p.data["v"])
    np.testing.assert_array_equal(got["dv"], p.data["dout"])
    assert abs(got["dq"]).max() <= 1e-4
    assert abs(got["dk"]).max() <= 1e-4


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "fp32"}, "dtype fp32"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"scale": 0.0}, "scale 0.0"),
        ({"scale": -1.0}, "scale -1.0"),
        ({"features": ["key_mask"]}, "a key mask"),
        ({"features": ["dropout"]}, "dropout"),
        ({"features": ["block_mask"]}, "a block mask"),
    ],
)
def test_what_is_not_covered_is_said(settings: dict[str, Any], reason: str) -> None:
    covered: dict[str, Any] = {"dtype": "bf16", "head_dim": 64, "scale": 0.125}
    assert hopper.unsupported_reason(**covered) is None
    said = hopper.unsupported_reason(**{**covered, **settings})
    assert said is not None
    assert said.startswith(reason)
    with pytest.raises(ValueError, match="scale=nan is not finite"):  # no kernel covers that
        hopper.unsupported_reason(**{**covered, "scale": math.nan})


def test_refusals_come_before_a_launch() -> None:
    p = Problem(seqlen_q=8, seqlen_k=8, dtype="fp32")
    with pytest.raises(ValueError, match="do not cover dtype fp32"):
        execute(p)
    with pytest.raises(ValueError, match="form for head_dim 128, arrays with 64"):
        execute(Problem(seqlen_q=8, seqlen_k=8), FORWARD_FORMS[2])


def test_heads_run_in_groups_that_fit_in_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 25 MiB: two heads of 8 MiB, one of more than 12.5, all three of the smallest."""
    assert heads_per_group(16, 8 << 20) == 2
    assert heads_per_group(16, 13 << 20) == heads_per_group(16, 1 << 30) == 1
    assert heads_per_group(3, 64) == 3
    # Whatever the size of a group, every tile is computed once: six heads in groups of four.
    p = Problem(batch=1, heads=6, seqlen_q=130, seqlen_k=130, dtype="fp16", causal=True)
    monkeypatch.setattr("analysis.l2.attention.L2_BYTES_FOR_HEADS", 4 * 130 * 64 * 8)
    assert heads_per_group(6, 130 * 64 * 8) == 4
    hold(p, backward=True)
