"""The lazy rescaling of the Hopper forward: softmax whatever the scores do, and masks by bits.

Walked from the last key on, scores rise by a step a key tile: under the lag of 8 binary orders,
just over it, far over it, and down. The reference is float64, the bounds those of every other test.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from flash_support import Problem, check, to_bits, to_float
from hopper_runs import changed_source, launch

from kernels.hopper_forms import FORWARD_FORMS, ForwardForm
from kernels.host import HostBackend
from kernels.launch import INCLUDE_DIR, Kernel

LAZY = [form for form in FORWARD_FORMS if form.head_dim < 256]
LN2 = math.log(2)


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
@pytest.mark.parametrize("rise", [0.0, 1.5, 7.5, 8.5, 40.0, -30.0])
def test_scores_may_rise_as_they_like(rise: float, dtype: str) -> None:
    """All forms but those of head_dim 256, with a mask or without, each in an order of its own. rise:
    in binary orders from one key tile to the next one walked."""
    for n, form in enumerate(LAZY):
        p = rising(form, rise, dtype, causal=n % 2 == 1)
        check(p, launch(p, form, backend=HostBackend(seed=n or None)))


def test_masks_of_every_length() -> None:
    """Keys of a tile from one to all, so that every bit is a tile's last; and rows that see nothing or
    one key, whose maximum is -inf before the first key, or all along."""
    for n, form in enumerate(LAZY):
        causal, rows = n % 2 == 1, form.tile.block_m
        for keys in (1, 2, 7, 8, 9, 63, 64, 65, form.block_n - 1, form.block_n):
            p = Problem(heads=1, seqlen_q=64, seqlen_k=keys, head_dim=form.head_dim, dtype="bf16", causal=causal)
            check(p, launch(p, form))
        p = Problem(heads=1, seqlen_q=rows + 70, seqlen_k=65, head_dim=form.head_dim, dtype="bf16", causal=causal)
        got = launch(p, form, backend=HostBackend(seed=1))
        check(p, got)
        assert np.isneginf(got["lse"]).any() == causal


FAULTS = {
    "the sum is left": ("state.sum[half] = mul_rn(state.sum[half], rescale[half]);", ""),
    "the output is left": ("if (moved) multiply_rows(out_acc, rescale);", ""),
    "the lag of fp16 is too long": ("LAG = 8.0f", "LAG = 60.0f"),
    "the maximum moves, its rows do not": ("if (!moves) top[half] = state.max[half];", ""),
    "a column too many": ("min_int(left % 8, 2)", "min_int(left % 8 + 1, 2)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_mistakes_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line changed, of the source of the persistent form or of its header."""
    header, kernel_of = (INCLUDE_DIR / "forward_sm90.cuh").read_text(), ForwardForm.kernel

    def mistaken(self: ForwardForm, *args: object, **options: object) -> Kernel:
        return changed_source(kernel_of(self, *args, **options), FAULTS[name], header=header)

    monkeypatch.setattr(ForwardForm, "kernel", mistaken)
    form = next(form for form in LAZY if form.persistent)
    few_keys = Problem(heads=1, seqlen_q=64, seqlen_k=9, head_dim=form.head_dim, dtype="fp16")
    wrong = 0
    for p in (few_keys, *(rising(form, rise, "fp16", causal=False) for rise in (1.5, 8.5))):
        try:
            check(p, launch(p, form))
        except AssertionError:
            wrong += 1
    assert wrong
