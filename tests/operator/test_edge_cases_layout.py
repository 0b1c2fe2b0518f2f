"""Sizes, strides and types: right values by hand, and views that equal their copies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_case import LAYOUTS, arranged
from attention_support import inputs, normal, run, run_and_check

import repro
from repro.attention.reference import max_error


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 32), (torch.float16, 64), (torch.bfloat16, 128)])
def test_a_lone_row_is_copied_bit_for_bit(device: str, dtype: torch.dtype, head_dim: int) -> None:
    q, k, v, dout = inputs(2, 2, 1, 1, head_dim, dtype=dtype, device=device)
    result = run(q, k, v, dout)
    assert torch.equal(result.out, v)
    assert torch.equal(result.dv, dout)
    assert result.dq.abs().max() <= 1e-4
    assert result.dk.abs().max() <= 1e-4
    scores = (q.double() * k.double()).sum(-1) / head_dim**0.5
    torch.testing.assert_close(result.lse.double(), scores, rtol=1e-5, atol=1e-5)


def test_guard_bands_survive(device: str) -> None:
    """Results are written where they belong: rows around them in the same buffers survive."""
    marker = 77.0
    q, k, v, dout = inputs(1, 2, 33, 33, 32, dtype=torch.float16, device=device)
    wide = [torch.full((1, 2, 65, 32), marker, dtype=q.dtype, device=device) for _ in range(4)]
    views = [w[:, :, 16:49] for w in wide]
    for view, values in zip(views, (q, k, v, dout), strict=True):
        view.copy_(values)
    for got, want in zip(run(*views, causal=True), run(q, k, v, dout, causal=True), strict=True):
        assert torch.equal(got, want)
    for buffer in wide:
        assert bool((buffer[:, :, :16] == marker).all())
        assert bool((buffer[:, :, 49:] == marker).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_beyond_the_range_of_fp16(device: str, dtype: torch.dtype) -> None:
    q = torch.full((1, 1, 1, 128), 32.0, dtype=dtype, device=device)
    k = torch.full((1, 1, 4, 128), 32.0, dtype=dtype, device=device)
    v = torch.arange(4.0, device=device)[:, None].expand(4, 128).to(dtype)[None, None]
    result = run(q, k, v, torch.ones_like(q))
    assert result.out.unique().tolist() == [1.5]
    assert abs(result.lse.item() - 11586.62) <= 0.01
    assert max_error(result.dv, torch.full_like(result.dv, 0.25)) <= 0.25e-3
    rows = torch.tensor([-135.76, -45.25, 45.25, 135.76], device=device)
    assert max_error(result.dk, rows[:, None].expand(4, 128)[None, None]) <= 0.5
    assert max_error(result.dq, torch.zeros_like(q)) <= 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_equal_their_copies(device: str, layout: str) -> None:
    q, k, v, dout = inputs(2, 2, 20, 20, 16, dtype=torch.float16, device=device)
    q, k, v = (arranged(t, layout) for t in (q, k, v))
    strided = run(q, k, v, dout, causal=True)
    copied = run(q.contiguous(), k.contiguous(), v.contiguous(), dout, causal=True)
    for name, got, want in zip(strided._fields, strided, copied, strict=True):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("form", ["expanded", "transposed"])
def test_strides_of_the_incoming_gradient(device: str, form: str) -> None:
    q, k, v, dout = inputs(2, 2, 20, 20, 16, dtype=torch.float16, device=device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = repro.flash_attention(*leaves)
    if form == "expanded":
        dout = torch.ones_like(dout)
        grads = torch.autograd.grad(out.sum(), leaves)  # its gradient has all strides 0
    else:
        grads = torch.autograd.grad(out, leaves, dout.mT.contiguous().mT)
    want = run(q, k, v, dout)
    for got, expected in zip(grads, want[2:], strict=True):
        assert torch.equal(got, expected)


def test_output_is_laid_out_like_q(device: str) -> None:
    """A model that transposes (B, N, H, D) gets its output back without a copy."""
    q, k, v = (normal(2, 20, 4, 16, device=device, seed=s).transpose(1, 2) for s in range(3))
    out = repro.flash_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("head_dim", [1, 5, 136])
def test_head_sizes_that_no_kernel_reads_in_place(device: str, head_dim: int) -> None:
    run_and_check(*inputs(1, 2, 33, 33, head_dim, dtype=torch.float16, device=device), causal=True)


def test_grouped_heads(device: str) -> None:
    q = torch.zeros(1, 6, 1, 8, device=device)
    k = torch.zeros(1, 2, 1, 8, device=device)
    v = torch.arange(2.0, device=device).view(1, 2, 1, 1).expand_as(k)
    result = run(q, k, v, torch.ones_like(q))
    assert result.out[0, :, 0, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert result.dv.shape == (1, 2, 1, 8)
    assert result.dv.unique().tolist() == [3]


def test_bf16_in_bf16_out(device: str) -> None:
    q, k, _, _ = inputs(1, 1, 1, 1, 128, dtype=torch.bfloat16, device=device)
    v = torch.full_like(k, 1.0078125)
    out = repro.flash_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert out.float().unique().tolist() == [1.0078125]


def test_every_spelling_of_scale(device: str) -> None:
    q = torch.ones(1, 1, 2, 4, device=device)
    for scale in (0.5, np.float32(0.5), np.float64(0.5), 1):
        _, lse = repro.flash_attention(q, q, q, scale=scale, return_lse=True)
        want = 4 * float(scale) + math.log(2)
        torch.testing.assert_close(lse.cpu(), torch.full((1, 1, 2), want), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape_q", "shape_k"),
    [
        ((0, 2, 5, 8), (0, 2, 5, 8)),
        ((2, 2, 0, 8), (2, 2, 5, 8)),
        ((2, 2, 5, 8), (2, 2, 0, 8)),
        ((2, 0, 5, 8), (2, 0, 5, 8)),
    ],
)
def test_sizes_of_zero(device: str, shape_q: tuple[int, ...], shape_k: tuple[int, ...]) -> None:
    q = normal(*shape_q, device=device)
    k, v = (normal(*shape_k, device=device, seed=s) for s in (1, 2))
    result = run(q, k, v, torch.ones_like(q))
    assert torch.equal(result.out, torch.zeros_like(q))
    assert bool((result.lse == -math.inf).all())
    for got, like in zip(result[2:], (q, k, v), strict=True):
        assert torch.equal(got, torch.zeros_like(like))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_up_to_the_size_that_the_docstring_states(dtype: torch.dtype) -> None:
    """Near 10⁸ neighbouring fp32 numbers lie 8 apart: a row sees one key."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 16, generator=random) for _ in range(3))
    largest = float((q @ k.mT).abs().max())
    q, k = ((x * (0.99e8 / largest) ** 0.5).to(dtype) for x in (q, k))
    v = v.to(dtype)
    out, lse = repro.flash_attention(q, k, v, scale=1.0, return_lse=True)
    scores = q.double() @ k.double().mT
    assert float(scores.abs().max()) > 0.98e8
    best = scores.topk(2, -1)
    # Of rows whose two largest scores rounding may exchange, nothing is claimed.
    clear = best.values[..., 0] - best.values[..., 1] > 64
    assert int(clear.sum()) > 130
    chosen = v.gather(2, best.indices[..., :1].expand_as(v))
    eps = torch.finfo(dtype).eps
    assert float((out - chosen)[clear].abs().max()) <= 2 * eps * float(v.abs().max())
    assert float((lse - best.values[..., 0]).abs().max()) <= 4 * 2.0**-24 * 1e8
