"""Dropout: which weights go, in both passes, and its seed under recomputation."""

from __future__ import annotations

from typing import Any

import torch
from attention_support import inputs, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import repro
from kernels.philox import kept_weights


def kept(seed: int, batch: int, heads: int, n: int, p: float, device: str, **options: Any) -> Tensor:
    """The dropout mask itself: with q = k = 0 and v = identity, out shows the weights."""
    q = torch.zeros(batch, heads, n, n, device=device)
    v = torch.eye(n, device=device).expand_as(q)
    out = repro.flash_attention(q, q, v, dropout_p=p, seed=seed, **options)
    assert isinstance(out, Tensor)
    return out.cpu() != 0


def test_p_of_zero_is_no_dropout(device: str) -> None:
    tensors = inputs(1, 2, 40, 40, 16, device=device)
    plain = run(*tensors)
    zero = run(*tensors, dropout_p=0.0, seed=7)
    for got, want in zip(zero, plain, strict=True):
        assert torch.equal(got, want)


def test_p_of_one_drops_everything(device: str) -> None:
    result = run(*inputs(1, 2, 40, 40, 16, device=device), dropout_p=1.0)
    for tensor in (result.out, result.dq, result.dk, result.dv):
        assert torch.equal(tensor, torch.zeros_like(tensor))
    assert bool(result.lse.isfinite().all())


def test_eval_mode_drops_nothing(device: str) -> None:
    q, k, v, _ = inputs(1, 2, 20, 20, 16, device=device)
    module = repro.FlashAttention(dropout_p=0.5, causal=True)
    plain = repro.flash_attention(q, k, v, causal=True)
    assert not torch.equal(module(q, k, v), plain)
    assert torch.equal(module.eval()(q, k, v), plain)


def test_one_mask_in_both_passes(device: str) -> None:
    q, k, _, _ = inputs(1, 1, 16, 16, 16, dtype=torch.float16, device=device)
    eye = torch.eye(16, dtype=torch.float16, device=device)[None, None]
    result = run(q, k, eye, eye, dropout_p=0.5, seed=3)
    assert torch.equal(result.dv == 0, result.out.mT == 0)
    assert 0 < int((result.out == 0).sum()) < 256
    torch.testing.assert_close(result.dv, result.out.mT, rtol=2e-3, atol=2e-3)


def test_seeds(device: str) -> None:
    q, k, v, _ = inputs(1, 2, 20, 20, 16, device=device)

    def call(seed: int | None = None) -> Tensor:
        out = repro.flash_attention(q, k, v, dropout_p=0.5, seed=seed)
        assert isinstance(out, Tensor)
        return out

    assert torch.equal(call(5), call(5))
    assert torch.equal(call(2**40 + 5), call(2**40 + 5))
    assert not torch.equal(call(5), call(6))
    assert not torch.equal(call(5), call(2**40 + 5))  # all 63 bits count
    assert not torch.equal(call(), call())
    torch.manual_seed(0)
    first = call()
    torch.manual_seed(0)
    assert torch.equal(call(), first)


def test_whole_numbers_are_kept(device: str) -> None:
    """q = k = 0 and v = 1 in fp32: out · Nk · (1 − p) counts the kept weights of a row."""
    batch, n, p = 8, 256, 0.1
    q = torch.zeros(batch, 1, n, 8, device=device)
    out = repro.flash_attention(q, q, torch.ones_like(q), dropout_p=p, seed=11)
    assert isinstance(out, Tensor)
    counts = out[..., 0].double() * n * (1 - p)
    assert float((counts - counts.round()).abs().max()) <= 1e-3
    assert abs(float(counts.sum()) / (batch * n * n) - (1 - p)) <= 0.00125


def test_the_mask_is_a_function_of_the_position(device: str) -> None:
    mask = kept(9, 2, 2, 32, 0.5, device)
    for tile in [(16, 32), (32, 16)]:
        assert torch.equal(kept(9, 2, 2, 32, 0.5, device, tile=tile), mask)
    # Neither the batch, nor the sequence, nor another data type moves it.
    assert torch.equal(kept(9, 1, 2, 32, 0.5, device), mask[:1])
    assert torch.equal(kept(9, 2, 2, 20, 0.5, device), mask[:, :, :20, :20])
    assert torch.equal(torch.from_numpy(kept_weights(9, 0.5, 2, 2, 32, 32)), mask)
    q = torch.zeros(2, 2, 32, 32, dtype=torch.float16, device=device)
    v = torch.eye(32, dtype=torch.float16, device=device).expand_as(q)
    out = repro.flash_attention(q, q, v, dropout_p=0.5, seed=9)
    assert isinstance(out, Tensor)
    assert torch.equal(out.cpu() != 0, mask)
    # Heads and batch items have masks of their own.
    assert not torch.equal(mask[0, 0], mask[0, 1])
    assert not torch.equal(mask[0, 0], mask[1, 0])


def test_checkpointing_replays_the_mask(device: str) -> None:
    q, k, v, dout = inputs(1, 2, 40, 40, 16, device=device)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def attend(*tensors: Tensor) -> Tensor:
        out = repro.flash_attention(*tensors, dropout_p=0.1)
        assert isinstance(out, Tensor)
        return out

    torch.manual_seed(4)
    plain = torch.autograd.grad(attend(*leaves), leaves, dout)
    torch.manual_seed(4)
    out = checkpoint(attend, *leaves, use_reentrant=False)
    torch.manual_seed(99)  # the recomputation must not depend on the generator's present state
    for got, want in zip(torch.autograd.grad(out, leaves, dout), plain, strict=True):
        assert torch.equal(got, want)
