"""The lazy rescaling of the Hopper forward: softmax whatever the scores do, and masks by bits.

Walked from the last key on, scores rise by a step a key tile: under the lag of 8 binary orders,
just over it, far over it, and down. The reference is float64, the bounds those of every other test.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from flash_support import Problem, aligned, check, to_bits, to_float, view

from kernels import hopper
from kernels.hopper_forms import FORWARD_FORMS, ForwardForm
from kernels.host import HostBackend
from kernels.launch import INCLUDE_DIR, Kernel

LAZY = [form for form in FORWARD_FORMS if form.head_dim < 256]
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
LN2 = math.log(2)
#: Binary orders by which the scores rise from one key tile to the next one walked.
RISES = (0.0, 1.5, 7.5, 8.5, 40.0, -30.0)


def execute(p: Problem, form: ForwardForm, seed: int | None = None) -> dict[str, np.ndarray]:
    arrays = []
    for name in ("q", "k", "v"):
        memory = aligned(p.data[name].shape, p.dtype)
        memory[...] = to_bits(p.data[name], p.dtype)
        arrays.append(view(name, memory, p.dtype))
    out, lse = aligned(p.data["q"].shape, p.dtype), aligned(p.data["q"].shape[:3], "fp32")
    assert p.scale is not None
    hopper.forward(
        HostBackend(seed=seed),
        *arrays,
        view("out", out, p.dtype),
        view("lse", lse, "fp32"),
        scale=p.scale,
        causal=p.causal,
        form=form,
    )
    return {"out": to_float(out, p.dtype), "lse": lse.astype(np.float64)}


def rising(form: ForwardForm, rise: float, dtype: str, causal: bool, tiles: int = 4) -> Problem:
    """Scores that rise by ``rise`` binary orders a key tile, for every second row of queries."""
    keys = tiles * form.block_n - 37
    p = Problem(heads=2, seqlen_q=150, seqlen_k=keys, head_dim=form.head_dim, dtype=dtype, causal=causal)
    assert p.scale is not None
    p.data["q"][..., 0] = np.where(np.arange(150) % 2, 4.0, 0.0)
    step = np.arange(keys)[::-1] // form.block_n
    p.data["k"][..., 0] = step * rise * LN2 / (4.0 * p.scale)
    for name in ("q", "k"):
        p.data[name] = to_float(to_bits(p.data[name], dtype), dtype)
    return p


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("rise", RISES)
def test_scores_may_rise_as_they_like(rise: float, dtype: str) -> None:
    """All forms but those of head_dim 256, with a mask or without, each in an order of its own."""
    for n, form in enumerate(LAZY):
        p = rising(form, rise, dtype, causal=n % 2 == 1)
        check(p, execute(p, form, seed=n or None))


@CAUSAL
def test_rows_that_see_nothing_or_one_key(causal: bool) -> None:
    """Their maximum is -inf before the first key, or all along."""
    for form in LAZY:
        p = Problem(
            heads=1, seqlen_q=form.tile.block_m + 70, seqlen_k=65, head_dim=form.head_dim, dtype="fp16", causal=causal
        )
        got = execute(p, form, seed=1)
        check(p, got)
        assert np.isneginf(got["lse"]).any() == causal


def test_masks_of_every_length() -> None:
    """Keys of a tile from one to all, so that every bit is a tile's last."""
    for form in LAZY:
        for keys in (1, 2, 7, 8, 9, 63, 64, 65, form.block_n - 1, form.block_n):
            p = Problem(heads=1, seqlen_q=64, seqlen_k=keys, head_dim=form.head_dim, dtype="bf16")
            check(p, execute(p, form))


FAULTS = {
    "the sum is left": ("state.sum[half] = mul_rn(state.sum[half], rescale[half]);", ""),
    "the output is left": ("if (moved) multiply_rows(out_acc, rescale);", ""),
    "the lag of fp16 is too long": ("LAG = 8.0f", "LAG = 60.0f"),
    "the maximum moves, its rows do not": ("if (!moves) top[half] = state.max[half];", ""),
    "a column too many": ("min_int(left % 8, 2)", "min_int(left % 8 + 1, 2)"),
}


@pytest.fixture
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the persistent form with one line changed, of the source or of its header."""
    right, wrong = FAULTS[request.param]
    include = '#include "forward_sm90.cuh"'
    header = (INCLUDE_DIR / "forward_sm90.cuh").read_text().replace("#pragma once", "")
    kernel_of = ForwardForm.kernel

    def mistaken(self: ForwardForm, *args: object, **options: object) -> Kernel:
        kernel = kernel_of(self, *args, **options)
        text = kernel.text().replace(include, header)
        assert text.count(right) == 1
        return Kernel(text.replace(right, wrong), kernel.entry, kernel.macros, kernel.threads)

    monkeypatch.setattr(ForwardForm, "kernel", mistaken)


@pytest.mark.parametrize("broken", FAULTS, indirect=True)
def test_mistakes_are_found(broken: None) -> None:
    form = next(form for form in LAZY if form.persistent)
    few_keys = Problem(heads=1, seqlen_q=64, seqlen_k=9, head_dim=form.head_dim, dtype="fp16")
    wrong = 0
    for p in (few_keys, *(rising(form, rise, "fp16", causal=False) for rise in (1.5, 8.5))):
        try:
            check(p, execute(p, form))
        except AssertionError:
            wrong += 1
    assert wrong
