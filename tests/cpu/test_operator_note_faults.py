"""Two formulas of the study notes are wrong. Each test shows the fault and the correct form.

F1 (note on tiling, §1.4): the running output, kept normalised, is updated without the old row
sum. F2 (note on recomputation, §4.3): the softmax gradient sums dP∘P over one block of keys only.
"""

from __future__ import annotations

import torch
from attention_support import inputs, run
from torch import Tensor

from repro.attention.reference import attention_reference, max_error

BLOCK = 16


def _forward(q: Tensor, k: Tensor, v: Tensor, *, with_old_sum: bool) -> Tensor:
    """Online softmax over blocks of keys with a normalised running output (FA 2022, Alg. 1)."""
    out = torch.zeros_like(q)
    top = torch.full((len(q), 1), -torch.inf, dtype=q.dtype)
    total = torch.zeros(len(q), 1, dtype=q.dtype)
    for keys, values in zip(k.split(BLOCK), v.split(BLOCK), strict=True):
        scores = q @ keys.T / q.shape[1] ** 0.5
        new_top = torch.maximum(top, scores.amax(1, keepdim=True))
        weights = torch.exp(scores - new_top)
        old = torch.exp(top - new_top)
        new_total = old * total + weights.sum(1, keepdim=True)
        kept = (total if with_old_sum else 1.0) * old * out
        out = (kept + weights @ values) / new_total
        top, total = new_top, new_total
    return out


def test_f1_the_update_needs_the_old_row_sum() -> None:
    q, k, v, _ = inputs(1, 1, 64, 64, 16)
    want = attention_reference(q, k, v).out[0, 0]
    double = [t.double()[0, 0] for t in (q, k, v)]
    assert max_error(_forward(*double, with_old_sum=True), want) < 1e-12
    assert max_error(_forward(*double, with_old_sum=False), want) > 0.1
    assert max_error(run(q, k, v, v).out[0, 0], want) < 1e-5
    # With a single block there is nothing old, and the fault does not show.
    short = [t[:BLOCK] for t in double]
    assert torch.equal(_forward(*short, with_old_sum=True), _forward(*short, with_old_sum=False))


def _query_gradient(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, whole_row: bool) -> Tensor:
    """dq by blocks of keys, with D_i summed over the whole row or over the block at hand."""
    scale = q.shape[1] ** -0.5
    weights = torch.softmax(q @ k.T * scale, 1)
    delta = (dout * (weights @ v)).sum(1, keepdim=True)  # = rowsum(dout ∘ out)
    dq = torch.zeros_like(q)
    for p, keys, values in zip(
        weights.split(BLOCK, 1), k.split(BLOCK), v.split(BLOCK), strict=True
    ):
        dp = dout @ values.T
        row_sum = delta if whole_row else (p * dp).sum(1, keepdim=True)
        dq += scale * (p * (dp - row_sum)) @ keys
    return dq


def test_f2_the_softmax_gradient_sums_the_whole_row() -> None:
    q, k, v, dout = inputs(1, 1, 64, 64, 16)
    want = attention_reference(q, k, v, dout).dq
    assert want is not None
    double = [t.double()[0, 0] for t in (q, k, v, dout)]
    assert max_error(_query_gradient(*double, whole_row=True), want[0, 0]) < 1e-12
    assert max_error(_query_gradient(*double, whole_row=False), want[0, 0]) > 0.05
    assert max_error(run(q, k, v, dout).dq, want) < 2e-5
