"""Masks, rows that see nothing, and values nobody may read: right values by hand."""

from __future__ import annotations

import math

import pytest
import torch
from attention_support import check, inputs, run, run_and_check

import repro

INF = math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_item_that_sees_nothing_is_zero_and_leaves_the_other_alone(device: str, dtype: torch.dtype) -> None:
    q, k, v, _ = inputs(2, 1, 3, 3, 4, dtype=dtype, device=device)
    dout = torch.ones_like(q)
    mask = torch.tensor([[False] * 3, [True] * 3], device=device)
    result = run(q, k, v, dout, key_mask=mask)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(result, name)[0], torch.zeros_like(q[0])), name
    assert torch.equal(result.lse[0], torch.full_like(result.lse[0], -INF))
    alone = run(q[1:], k[1:], v[1:], dout[1:])
    for name, got, want in zip(result._fields, result, alone, strict=True):
        assert torch.equal(got[1:], want), name
    check(result, q, k, v, dout, key_mask=mask)


def test_the_only_key_is_masked(device: str) -> None:
    q, k, v, dout = inputs(1, 1, 1, 1, 4, device=device)
    result = run(q, k, v, dout, key_mask=torch.zeros(1, 1, dtype=torch.bool, device=device))
    assert result.lse.item() == -INF
    for tensor in (result.out, result.dq, result.dk, result.dv):
        assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "weights", "lse"),
    [
        (2, 5, [[1 / 4] * 4 + [0], [1 / 5] * 5], [math.log(4), math.log(5)]),
        (5, 2, [[0, 0], [0, 0], [0, 0], [1, 0], [1 / 2, 1 / 2]], [-INF, -INF, -INF, 0, math.log(2)]),
        (1, 16, [[1 / 16] * 16], [math.log(16)]),
    ],
)
def test_causal_is_aligned_bottom_right(
    device: str, seqlen_q: int, seqlen_k: int, weights: list[list[float]], lse: list[float]
) -> None:
    """q = k = 0 and v = identity: out is the weight matrix itself."""
    q = torch.zeros(1, 1, seqlen_q, seqlen_k, device=device)
    k = torch.zeros(1, 1, seqlen_k, seqlen_k, device=device)
    v = torch.eye(seqlen_k, device=device)[None, None]
    out, stats = repro.flash_attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out[0, 0].cpu(), torch.tensor(weights), rtol=0, atol=1e-6)
    torch.testing.assert_close(stats[0, 0].cpu(), torch.tensor(lse), rtol=0, atol=1e-6)
    hidden = torch.tensor(weights) == 0
    assert torch.equal(out[0, 0].cpu()[hidden], torch.zeros(int(hidden.sum())))
    run_and_check(*inputs(1, 2, seqlen_q, seqlen_k, 16, device=device), causal=True)


def test_a_first_tile_without_a_key(device: str) -> None:
    q, k, v, dout = inputs(1, 1, 8, 128, 32, device=device)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    mask = torch.arange(128, device=device)[None] >= 100
    result = run(q, k, v, dout, key_mask=mask)
    mean = v[:, :, 100:].mean(2, keepdim=True).expand_as(q)
    torch.testing.assert_close(result.out, mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.lse, torch.full_like(result.lse, math.log(28)), rtol=0, atol=1e-5)
    check(result, q, k, v, dout, key_mask=mask)


def test_scores_below_any_finite_stand_in(device: str) -> None:
    """Masked scores are -inf, not a large negative number."""

    def rows(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).view(1, 1, -1, 1)

    mask = torch.tensor([[True, False]], device=device)
    out, lse = repro.flash_attention(rows(-20000, 0), rows(1, 0), rows(1, 100), scale=1, key_mask=mask, return_lse=True)
    assert out.flatten().tolist() == [1, 1]
    assert lse.flatten().tolist() == [-20000, 0]


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF])
def test_masked_slots_may_hold_anything(device: str, garbage: float) -> None:
    _, k, v, dout = inputs(2, 1, 3, 3, 64, dtype=torch.float16, device=device)
    q = torch.full_like(k, 0.5)
    mask = torch.tensor([[True, False, False], [True] * 3], device=device)
    for tensor in (k, v):
        tensor.masked_fill_(~mask[:, None, :, None], garbage)
    result = run(q, k, v, dout, key_mask=mask)
    assert torch.equal(result.out[0], v[0, :, :1].expand(1, 3, 64))
    for grad in (result.dk, result.dv):
        assert torch.equal(grad[0, :, 1:], torch.zeros_like(grad[0, :, 1:]))
    check(result, q, k, v, dout, key_mask=mask)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 64), (torch.float32, 32)])
def test_rows_beyond_the_end_count_for_nothing(device: str, dtype: torch.dtype, head_dim: int) -> None:
    """N = 5 in tiles of at least 32 rows, in buffers whose rows beyond N hold NaN."""
    size = (1, 1, 140, head_dim)
    wide = [torch.full(size, math.nan, dtype=dtype, device=device) for _ in range(4)]
    views = [t[:, :, :5] for t in wide]
    for view, values in zip(views, inputs(1, 1, 5, 5, head_dim, dtype=dtype), strict=True):
        view.copy_(values)
    run_and_check(*views)
    run_and_check(*views, causal=True)
