"""Windows, sinks, softcap and ALiBi in the Hopper backward: gradients to float64, exact bytes.

The backward runs from the reference's own output and statistics, so that nothing but it is tried.
Every launch runs with all checks on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_case import references
from flash_support import Problem, check
from hopper_runs import GRADIENTS, Values, launch, predicted
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.hardware import H200
from analysis.shapes import AttentionShape
from analysis.traffic import Traffic
from kernels import hopper
from kernels.hopper import BACKWARD_FORMS, BackwardForm
from kernels.host import HostBackend
from kernels.launches import Device, launches_of
from repro.attention.reference import beyond_bound
from repro.prediction import predict

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SLOPES = np.array([0.5, 0.03125], np.float32)
CHANGED: dict[str, Any] = {"softcap": 2.0, "alibi_slopes": SLOPES}
TURNS = pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in turns"])
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])


def backward_of(
    p: Problem, form: BackwardForm | None = None, *, seed: int | None = None, os_threads: int | None = None, **how: Any
) -> Values:
    """Gradients; every byte counted is held to the prediction, tensor by tensor.

    seed: threads of a block in an order drawn from it. how: of ``kernels.hopper.backward``.
    """
    backend = HostBackend(seed=seed, os_threads=os_threads)
    got = launch(p, form, ["backward"], backend=backend, **how)
    wanted = predicted(p, form, ["backward"], deterministic=how.get("deterministic", False))
    assert Traffic(backend.traffic).kernels == wanted.kernels
    return {name: got[name] for name in GRADIENTS}


def hold(p: Problem, got: Values) -> None:
    """Gradients to float64: at most twice the framework's own error in the type."""
    arrays = [torch.from_numpy(p.data[name]).to(TYPES[p.dtype]) for name in ("q", "k", "v", "dout")]
    slopes = None if p.alibi_slopes is None else torch.from_numpy(p.slopes()[..., 0].copy())
    masks = {"causal": p.causal, "window": p.window, "sinks": p.sinks}
    known = {"scale": p.scale, "softcap": p.softcap, "alibi_slopes": slopes}
    want, theirs = references(*arrays, None, None, masks, known)
    for name in GRADIENTS:
        wrong = beyond_bound(name, torch.from_numpy(got[name]), want, theirs, TYPES[p.dtype])
        assert wrong is None, (wrong, p)


def problem(changes: dict[str, Any], **sizes: Any) -> Problem:
    """Two heads that share keys; several tiles of 128 keys and of 64 to 128 queries."""
    common = {"seqlen_q": 330, "seqlen_k": 330, "head_dim": 64, "dtype": "fp16"}
    return Problem(**{**common, "heads": 2, "kv_heads": 1, **sizes, **changes})


WINDOWS: list[dict[str, Any]] = [
    {"window": (100, 0), "causal": True},
    {"window": (20, 150), "sinks": 5},
    {"window": (0, 0)},
    {"window": (0, None), "sinks": 130},
    {"window": (16, None), "seqlen_q": 70, "seqlen_k": 400},  # key tiles that no query sees
    {"window": (3, 9), "seqlen_q": 400, "seqlen_k": 70},  # query tiles that see no key
    {"window": (3, None), "sinks": 2, "seqlen_q": 400, "seqlen_k": 70, "causal": True},
    {"window": (70, 0), "sinks": 1, "causal": True, "seqlen_k": 500},
]


@pytest.mark.parametrize(
    ("changes", "deterministic"), [(changes, bool(number % 2)) for number, changes in enumerate(WINDOWS)], ids=str
)
def test_windows(changes: dict[str, Any], deterministic: bool) -> None:
    p = problem(changes)
    hold(p, backward_of(p, deterministic=deterministic, os_threads=2))


def test_scores_far_beyond_the_cap() -> None:
    """Where tanh is one the gradient is nothing, and not a NaN."""
    p = problem({"softcap": 1.0}, head_dim=128, seqlen_q=100, seqlen_k=100, scale=20.0)
    hold(p, backward_of(p))


@pytest.mark.thorough
@CAUSAL
@pytest.mark.parametrize("form", [f for f in BACKWARD_FORMS if f.block_m != 80], ids=lambda f: f.name)
def test_every_form(form: BackwardForm, causal: bool) -> None:
    """In any order and, where the form can take them, in turns; and walked in a sawtooth."""
    changed = CHANGED if form.head_dim == 128 else {"alibi_slopes": SLOPES}
    ways: list[dict[str, Any]] = [{}]
    if not form.dq_from_registers:
        ways += [{"deterministic": True}, {"order": "sawtooth", "wave": 2}]
    tried = [*WINDOWS, changed, {**WINDOWS[1], **changed}, {"softcap": 2.0}]
    for seed, changes in enumerate(tried):
        dtype = "bf16" if seed % 2 or changes == tried[-1] else "fp16"
        p = problem({**changes, "causal": causal}, head_dim=form.head_dim, dtype=dtype, seed=seed)
        for how in ways:
            hold(p, backward_of(p, form, seed=seed or None, **how))


sides = st.one_of(st.none(), st.integers(0, 40), st.integers(0, 500))


@st.composite
def problems(draw: st.DrawFn, causal: bool, changes: dict[str, Any]) -> Problem:
    kv_heads = 1 if changes else draw(st.integers(1, 2))
    return Problem(
        batch=draw(st.integers(1, 2)),
        heads=2,
        kv_heads=kv_heads,
        seqlen_q=draw(st.integers(1, 420)),
        seqlen_k=draw(st.integers(1, 420)),
        head_dim=128 if changes else 64,
        dtype="fp16",
        causal=causal,
        window=draw(st.tuples(sides, sides)),
        sinks=draw(st.sampled_from([0, 0, 1, 4, 150])),
        seed=draw(st.integers(0, 9)),
        **changes,
    )


@pytest.mark.thorough
@TURNS
@pytest.mark.parametrize("changes", [{}, CHANGED], ids=["windows", "changed"])
@CAUSAL
def test_drawn_problems(causal: bool, changes: dict[str, Any], deterministic: bool) -> None:
    @given(problems(causal, changes))
    @settings(deadline=None, max_examples=40)
    def try_one(p: Problem) -> None:
        hold(p, backward_of(p, deterministic=deterministic, os_threads=2))

    try_one()


def test_the_gradient_of_lse_follows_the_window() -> None:
    p = problem(WINDOWS[0], with_dlse=True)
    check(p, backward_of(p))


def test_turns_are_the_same_bit_for_bit_however_blocks_run() -> None:
    """Key tiles that skip a query tile take no turn at it: nobody waits for them."""
    p = problem({"window": (150, 0), "sinks": 3, "causal": True}, heads=4, kv_heads=2, seqlen_q=600, seqlen_k=700)
    first = backward_of(p, deterministic=True, os_threads=1)
    hold(p, first)
    for seed, os_threads in ((None, 4), (1, 3)):
        again = backward_of(p, deterministic=True, seed=seed, os_threads=os_threads)
        for name in GRADIENTS:
            np.testing.assert_array_equal(again[name], first[name])


@TURNS
@CAUSAL
def test_a_cap_in_bf16_at_head_dim_64(causal: bool, deterministic: bool) -> None:
    for sizes in ({}, {"seqlen_q": 90, "seqlen_k": 300, "batch": 2}, {"seqlen_k": 70}):
        p = problem({"softcap": 2.0}, dtype="bf16", causal=causal, **sizes)
        hold(p, backward_of(p, deterministic=deterministic))


# ---- dispatch -----------------------------------------------------------------------------------


def test_a_window_that_hides_nothing_is_the_same_kernel() -> None:
    shape = AttentionShape(1, 1, 300, 300, 64, dtype="bf16", causal=True, window=(299, 0), sinks=3)
    found = launches_of(hopper.ALGORITHM, shape, "backward").main
    assert found.kernel == hopper.backward_form(64, True).kernel("", "bf16", True)


@CAUSAL
@pytest.mark.parametrize(
    ("head_dim", "changes", "asked", "macro"),
    [
        (128, {"window": (60, 0), "sinks": 1}, {}, "WINDOW"),
        (128, {}, {"softcap": True}, "SOFTCAP"),
        (128, {}, {"alibi": True}, "ALIBI"),
        (64, {}, {"softcap": True}, "SOFTCAP"),
    ],
    ids=["window", "softcap", "ALiBi", "softcap d64"],
)
def test_dispatch_takes_them(
    head_dim: int, changes: dict[str, Any], asked: dict[str, bool], macro: str, causal: bool
) -> None:
    """At head dimension 128 in tiles of 64 queries: 80, the choice without any, leave too few registers."""
    shape = AttentionShape(1, 1, 512, 512, head_dim, dtype="bf16", causal=causal, **changes)
    block_m = 64 if head_dim == 128 else hopper.backward_form(64, causal).block_m
    for deterministic, name in ((False, hopper.ALGORITHM), (True, hopper.DETERMINISTIC)):
        found = launches_of("auto", shape, "backward", Device("90"), deterministic=deterministic, **asked)
        assert found.algorithm == name
        assert dict(found.main.kernel.macros).items() >= {macro: 1, "BLOCK_M": block_m}.items()
    told = predict("auto", shape, "backward", H200, **asked)
    assert told.tile.block_m == block_m


@pytest.mark.parametrize(
    ("dtype", "window", "asked", "named"),
    [
        ("fp16", None, {"softcap": True}, "a softcap in fp16"),
        ("bf16", 60, {"softcap": True}, "a window and a softcap in bf16"),
        ("bf16", None, {"softcap": True, "alibi": True}, "a softcap and ALiBi in bf16"),
    ],
)
def test_what_would_spill_stays_with_the_sm80_form(
    dtype: str, window: int | None, asked: dict[str, bool], named: str
) -> None:
    shape = AttentionShape(1, 1, 512, 512, 64, dtype=dtype, window=(window, None))
    forward = launches_of("auto", shape, "forward", Device("90"), **asked)
    assert forward.algorithm == hopper.ALGORITHM
    left = launches_of("auto", shape, "backward", Device("90"), **asked)
    assert left.algorithm == "flash"
    assert left.reason is not None
    assert left.reason.endswith(f"{named} at head_dim 64 (the backward would spill registers)")
    with pytest.raises(ValueError, match=f"{named} at head_dim 64"):
        launches_of(hopper.ALGORITHM, shape, "backward", **asked)
    features = [*asked, *(["window"] if window is not None else [])]
    for form in (BackwardForm(64, 128), BackwardForm(128, 80)):
        with pytest.raises(ValueError, match=f"{form.name} has no .*softcap.* in {dtype}, for"):
            form.kernel("", dtype, False, features=features)
