"""The Hopper kernels on a Hopper GPU: against float64, repeatedly, and beside the host backend.

A kernel that hangs would take the process with it, so processes of their own try all of them first
(``repro.instruments.hopper_guard``): where one is refused, these tests fail and the others still
run. A test that hangs all the same is ended, with the whole process, after a minute.
"""

from __future__ import annotations

import dataclasses
import faulthandler
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flash_support import Problem, check, to_bits, to_float
from gpu_support import download, execute, missing_gpu, upload
from hopper_support import launch_vocabulary, product_of

from kernels import dispatch, hopper
from kernels.hopper import BACKWARD_FORMS, FORWARD_FORMS, BackwardForm, ForwardForm
from kernels.launch import Argument, Array, Kernel, TensorMap
from kernels.launching.cupy_backend import CupyBackend
from repro.instruments import hopper_cases, hopper_guard


def missing_hopper() -> str | None:
    """Why there is no Hopper GPU to test on, or None."""
    reason = missing_gpu()
    if reason is not None:
        return reason
    capability = CupyBackend().compute_capability
    return None if capability == dispatch.HOPPER else f"this one has capability {capability}"


REASON = missing_hopper()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"needs a Hopper GPU: {REASON}")
LIMIT_S = 60.0
#: Every form, in any order and in turns where it can take them.
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


@pytest.fixture(autouse=True)
def _they_come_back() -> Iterator[None]:
    for name in hopper_cases.NAMES:
        reason = hopper_guard.refusal(name)
        if reason is not None:
            pytest.fail(f"{name}: {reason}")
    # A thread that waits for the driver takes no signal; this ends the process from outside it.
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def forward(p: Problem, form: ForwardForm, repeats: int = 1) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """out and lse in float64, and the raw bits of every repetition."""
    backend = CupyBackend()
    q, k, v = (upload(n, to_bits(p.data[n], p.dtype), p.dtype) for n in ("q", "k", "v"))
    blank = np.full(p.data["q"].shape, np.nan)
    lse = upload("lse", np.full(blank.shape[:3], np.nan, np.float32), "fp32")
    slopes = None
    if p.alibi_slopes is not None:
        slopes = upload("alibi_slopes", np.ascontiguousarray(p.slopes()), "fp32")
    raw = []
    for _ in range(repeats):
        out = upload("out", to_bits(blank, p.dtype), p.dtype)
        assert p.scale is not None
        hopper.forward(
            backend,
            q,
            k,
            v,
            out,
            lse,
            scale=p.scale,
            causal=p.causal,
            form=form,
            window=p.window,
            sinks=p.sinks,
            softcap=p.softcap,
            alibi_slopes=slopes,
        )
        raw.append(download(out))
    values = {"out": to_float(raw[0], p.dtype), "lse": download(lse).astype(np.float64)}
    return values, raw


@pytest.mark.smoke
@pytest.mark.sanitize
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_small_case(head_dim: int) -> None:
    p = Problem(heads=2, kv_heads=1, seqlen_q=130, seqlen_k=200, head_dim=head_dim, dtype="bf16", causal=True)
    check(p, execute(p, "flash-sm90", None))


@pytest.mark.smoke
@pytest.mark.sanitize
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_small_case_of_the_form_for_long_sequences(head_dim: int) -> None:
    p = Problem(heads=2, seqlen_q=130, seqlen_k=200, head_dim=head_dim, dtype="bf16", causal=True)
    check(p, forward(p, hopper.forward_form(head_dim, True, 16384))[0])


@CAUSAL
@pytest.mark.parametrize("changed", [False, True], ids=["window", "window, softcap, alibi"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows_caps_and_slopes(head_dim: int, changed: bool, causal: bool) -> None:
    """Tiles in the middle and at both ends of a window, sinks, rows that see nothing."""
    for seqlen_q, seqlen_k in ((130, 900), (1500, 1500), (700, 90)):
        p = Problem(
            heads=2,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            dtype="bf16",
            causal=causal,
            window=(500, 30),
            sinks=5,
        )
        if changed:
            p = dataclasses.replace(p, softcap=3.0, alibi_slopes=np.float32([0.25, 0.0625]))
        check(p, forward(p, hopper.forward_form(head_dim, causal, seqlen_q, featured=True))[0])


@CAUSAL
@pytest.mark.parametrize("form", FORWARD_FORMS, ids=lambda f: f.name)
def test_every_form(form: ForwardForm, causal: bool) -> None:
    lengths = [(1, 1), (64, 63), (129, 127), (193, 257), (333, 461), (461, 333), (512, 512)]
    for dtype in ("fp16", "bf16"):
        for seqlen_q, seqlen_k in lengths:
            p = Problem(
                heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=form.head_dim, dtype=dtype, causal=causal
            )
            check(p, forward(p, form)[0])


@CAUSAL
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_both_passes(head_dim: int, dtype: str, causal: bool) -> None:
    for seqlen_q, seqlen_k in ((1, 1), (65, 129), (333, 461), (461, 333), (512, 512)):
        p = Problem(
            batch=2,
            heads=4,
            kv_heads=2,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
        )
        check(p, execute(p, "flash-sm90", None))


@CAUSAL
@BACKWARDS
def test_every_form_of_the_backward(form: BackwardForm, deterministic: bool, causal: bool) -> None:
    backend = CupyBackend()
    for seqlen_q, seqlen_k in ((1, 1), (80, 128), (81, 129), (333, 461), (461, 333)):
        p = Problem(
            batch=2,
            heads=4,
            kv_heads=2,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=form.head_dim,
            dtype="bf16",
            causal=causal,
        )
        sources = {"out": "q", "dq": "q", "dk": "k", "dv": "v"}
        arrays = {}
        for name in ("q", "k", "v", "dout", *sources):
            like = p.data[sources.get(name, name)]
            values = np.full(like.shape, np.nan) if name in sources else like
            arrays[name] = upload(name, to_bits(values, p.dtype), p.dtype)
        lse = upload("lse", np.empty(p.data["q"].shape[:3], np.float32), "fp32")
        assert p.scale is not None
        q, k, v, out = (arrays[name] for name in ("q", "k", "v", "out"))
        hopper.forward(backend, q, k, v, out, lse, scale=p.scale, causal=causal)
        gradients = [arrays[name] for name in ("dq", "dk", "dv")]
        hopper.backward(
            backend,
            q,
            k,
            v,
            out,
            arrays["dout"],
            lse,
            *gradients,
            scale=p.scale,
            causal=causal,
            form=form,
            deterministic=deterministic,
        )
        check(p, {name: to_float(download(arrays[name]), p.dtype) for name in sources})


@CAUSAL
@pytest.mark.parametrize("changed", [False, True], ids=["window", "window, softcap, alibi"])
def test_windows_caps_and_slopes_in_the_backward(changed: bool, causal: bool) -> None:
    """Key tiles that nobody sees and query tiles that see nothing; in turns the same bits."""
    for seqlen_q, seqlen_k in ((130, 900), (1500, 1500), (700, 90)):
        p = Problem(
            heads=4,
            kv_heads=2,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=128,
            dtype="bf16",
            causal=causal,
            window=(500, 30),
            sinks=5,
        )
        if changed:
            slopes = np.float32([0.25, 0.0625, 0.25, 0.0625])
            p = dataclasses.replace(p, softcap=3.0, alibi_slopes=slopes)
        check(p, execute(p, "flash-sm90", None))
        first = execute(p, hopper.DETERMINISTIC, None)
        check(p, first)
        for _ in range(5):
            again = execute(p, hopper.DETERMINISTIC, None, pdl=True)
            for name in ("dq", "dk", "dv"):
                np.testing.assert_array_equal(again[name], first[name])


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_gradient_of_lse(head_dim: int, causal: bool) -> None:
    for seqlen_q, seqlen_k in ((65, 129), (461, 333)):
        p = Problem(
            heads=2,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            dtype="bf16",
            causal=causal,
            with_dlse=True,
        )
        check(p, execute(p, "flash-sm90", None))


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_that_start_early_wait_for_what_they_need(head_dim: int, causal: bool) -> None:
    """On a full card, again and again: scratch memory holds what the run before left there."""
    p = Problem(batch=4, heads=16, seqlen_q=1024, seqlen_k=1024, head_dim=head_dim, dtype="bf16", causal=causal)
    plain = execute(p, "flash-sm90", None)
    for _ in range(5):
        early = execute(p, "flash-sm90", None, pdl=True)
        for name in ("dk", "dv"):
            np.testing.assert_array_equal(early[name], plain[name])
        assert abs(early["dq"] - plain["dq"]).max() < 1e-2  # added in no fixed order


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pdl", [False, True])
def test_a_deterministic_backward(pdl: bool, head_dim: int, causal: bool) -> None:
    """Right on small cases; on a full card the same bits every time, launched early or not."""
    for seqlen_q, seqlen_k in ((1, 1), (65, 129), (333, 461), (461, 333)):
        p = Problem(
            batch=2,
            heads=4,
            kv_heads=2,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            dtype="bf16",
            causal=causal,
        )
        check(p, execute(p, hopper.DETERMINISTIC, None, pdl=pdl))
    p = Problem(batch=4, heads=16, seqlen_q=1024, seqlen_k=1024, head_dim=head_dim, dtype="bf16", causal=causal)
    first = execute(p, "flash-sm90-deterministic", None)
    for _ in range(10):
        again = execute(p, hopper.DETERMINISTIC, None, pdl=pdl)
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(again[name], first[name])


@CAUSAL
@pytest.mark.parametrize("form", FORWARD_FORMS, ids=lambda f: f.name)
def test_many_waves_give_the_same_bits_every_time(form: ForwardForm, causal: bool) -> None:
    """A fence or an order that is missing shows now and then, on a full card."""
    p = Problem(batch=4, heads=16, seqlen_q=1024, seqlen_k=1024, head_dim=form.head_dim, dtype="bf16", causal=causal)
    values, raw = forward(p, form, repeats=20)
    for again in raw[1:]:
        np.testing.assert_array_equal(again, raw[0])
    if form.persistent:
        # Which block computes a tile, and whose turn it is, changes no bit.
        alone = dataclasses.replace(form, persistent=False, pingpong=False)
        np.testing.assert_array_equal(forward(p, alone)[1][0], raw[0])
    elif not form.pingpong:
        check(p, values, factor=2.0)  # N above the 512 that the bounds are stated for


@pytest.mark.parametrize("nats", [0, 20, 60, 200])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_optimistic_softmax_under_drift(head_dim: int, nats: int) -> None:
    """Scores that grow towards the first keys: flagged and repaired from about 28 nats on."""
    p = Problem(heads=2, seqlen_q=500, seqlen_k=1000, head_dim=head_dim, dtype="bf16")
    assert p.scale is not None
    p.data["q"][..., 0] = 8
    p.data["k"][..., 0] = np.linspace(nats, 0, p.seqlen_k) / (8 * p.scale)
    for name in ("q", "k"):
        p.data[name] = to_float(to_bits(p.data[name], "bf16"), "bf16")
    got = execute(p, "flash-sm90-optimistic", None)
    check(p, {"out": got["out"]}, factor=2.0)


def test_the_rule_takes_them() -> None:
    q = upload("q", np.zeros((1, 1, 64, 64), np.float16), "fp16")
    assert dispatch.choose(CupyBackend(), [q], scale=0.125).algorithm == "flash-sm90"


# ---- the vocabulary, host and device -------------------------------------------------------------


def run_on_device(kernel: Kernel, shared_bytes: int, args: list[Argument]) -> None:
    """Launches with copies of the arrays, and copies them back."""
    import cupy

    copies: list[tuple[Array, Any]] = []

    def moved(a: Array) -> Array:
        memory = cupy.asarray(a.owner)
        copies.append((a, memory))
        return Array(a.name, memory.data.ptr, a.shape, a.strides, a.dtype, a.access, memory)

    there: list[Argument] = []
    for arg in args:
        if isinstance(arg, TensorMap):
            there.append(TensorMap(moved(arg.array), arg.box_rows))
        else:
            there.append(moved(arg) if isinstance(arg, Array) else arg)
    CupyBackend().launch(kernel, (1, 1, 1), shared_bytes, there)
    cupy.cuda.runtime.deviceSynchronize()
    for array, memory in copies:
        if array.access != "r":
            array.owner[...] = cupy.asnumpy(memory)


def both(what: int, **settings: Any) -> None:
    target = settings.pop("target", None)
    outcomes = []
    for run in (None, run_on_device):
        stored = None if target is None else target.copy()
        done = launch_vocabulary(what, target=stored, run=run, **settings)
        outcomes.append((done, stored))
    (host, kept), (device, written) = outcomes
    np.testing.assert_array_equal(host.shared, device.shared)
    np.testing.assert_array_equal(host.sums, device.sums)
    np.testing.assert_allclose(host.floats, device.floats, rtol=1e-5, atol=1e-5)
    if target is not None:
        np.testing.assert_array_equal(kept, written)


@pytest.mark.parametrize("row", [0, 70, 100, -3])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_boxes_agree(head_dim: int, row: int) -> None:
    rng = np.random.default_rng(row + 10)
    x = rng.integers(1, 65536, (2, 3, 100, head_dim), dtype=np.uint16)
    both(0, source=x, row=row, head=2, batch=1)
    both(1, words=x[0, 0, :64].copy(), target=x, row=row, head=2, batch=1)


@pytest.mark.smoke
def test_bulk_copies_and_stmatrix_agree() -> None:
    rng = np.random.default_rng(1)
    both(2, words=rng.standard_normal(512).astype(np.float32))
    registers = rng.integers(0, 2**32, 512, dtype=np.uint32)
    rows = rng.permutation(512)[:128].astype(np.uint32)
    for what in (3, 4):
        both(what, words=np.concatenate([registers, rows]), clear_bytes=8192)


@pytest.mark.smoke
def test_votes_agree() -> None:
    both(12, row=77)


@pytest.mark.smoke
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_products_agree(dtype: str) -> None:
    rng = np.random.default_rng(2)
    a, b = (to_bits(rng.standard_normal((n, 128)), dtype) for n in (64, 128))
    for a_mn in (False, True):
        for b_mn in (False, True):
            for step in (0, 3, 5):
                words, fields = product_of(a, b, a_mn, b_mn, step)
                both(6 + 2 * a_mn + b_mn, words=words, dtype=dtype, **fields)
