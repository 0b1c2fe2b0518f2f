"""What autograd asks of the backward: flags, block masks, saved tensors, gradients nobody needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_support import Result, check, inputs, run, run_and_check
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import repro


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 64)])
def test_the_causal_flag_reaches_the_backward(device: str, tile: tuple[int, int], causal: bool) -> None:
    tensors = inputs(1, 1, 256, 256, 64, dtype=torch.float16, device=device)
    result = run_and_check(*tensors, causal=causal, tile=tile)
    if causal:
        # Only the last query sees the last key, so dv[N-1] = P[N-1, N-1] · dout[N-1].
        q, k, _, dout = (t.double()[0, 0] for t in tensors)
        weight = torch.exp(q[-1] @ k[-1] / 8 - result.lse.double()[0, 0, -1])
        torch.testing.assert_close(result.dv[0, 0, -1].double(), weight * dout[-1], rtol=5e-3, atol=1e-4)


def _same(got: Result, want: Result) -> None:
    """Bitwise, but for dq: its atomic additions come in any order."""
    for name in ("out", "lse", "dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_block_masks_that_are_no_masks(device: str) -> None:
    """All blocks are the dense call, the lower triangle the causal one; a row or a column may be empty."""
    tensors = inputs(1, 2, 128, 128, 64, dtype=torch.float16, device=device)
    every = torch.ones(2, 2, dtype=torch.bool, device=device)
    for mask, causal in ((every, False), (every.tril(), True)):
        sparse = run(*tensors, block_mask=mask, causal=causal, tile=(64, 64))
        check(sparse, *tensors, causal=causal)
        _same(sparse, run(*tensors, causal=causal, tile=(64, 64)))
    for blocks in ([[1, 0], [1, 1]], [[1, 1], [0, 1]], [[0, 0], [1, 0]]):
        run_and_check(*tensors, block_mask=torch.tensor(blocks, device=device).bool(), tile=(64, 64))


def test_block_masks_of_each_head_and_item(device: str) -> None:
    tensors = inputs(2, 2, 60, 75, 32, device=device)
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(2, 2, 4, 5, generator=generator) < 0.5).to(device)
    for block_mask in (mask, mask[0], mask[0, 0]):
        run_and_check(*tensors, block_mask=block_mask, tile=(16, 16))


def test_blocks_larger_than_any_tile(device: str) -> None:
    """A block that no kernel can hold is walked in smaller tiles."""
    tensors = inputs(1, 1, 600, 600, 32, device=device)
    mask = torch.tensor([[True, False], [False, True]], device=device)
    run_and_check(*tensors, block_mask=mask, tile=(512, 512))


def test_a_second_derivative_is_an_error(device: str) -> None:
    leaves = [t.requires_grad_() for t in inputs(1, 1, 4, 4, 8, device=device)[:3]]
    out = repro.flash_attention(*leaves)
    assert isinstance(out, Tensor)
    # out.sum() sends a constant gradient: this is where once-differentiable would say nothing.
    first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    for gradient in first:
        assert gradient.requires_grad
        for leaf in leaves:
            with pytest.raises(RuntimeError, match="second derivatives are not supported"):
                torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)
    out = repro.flash_attention(*leaves)
    assert isinstance(out, Tensor)
    weighted = torch.autograd.grad((out**2).sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.autograd.grad(weighted[0].sum(), leaves[0])


def test_forward_mode_is_an_error(device: str) -> None:
    q, k, v, tangent = inputs(1, 1, 4, 4, 8, device=device)
    with pytest.raises(RuntimeError, match="forward-mode derivatives are not supported"):
        torch.func.jvp(lambda t: repro.flash_attention(t, k, v), (q,), (tangent,))


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, 0),
        ({"key_mask": torch.ones(2, 20, dtype=torch.bool)}, 1),
        ({"dropout_p": 0.5}, 1),
        ({"block_mask": torch.ones(2, 2, dtype=torch.bool), "tile": (16, 16)}, 1),
        ({"window": (5, 0), "sinks": 2}, 0),
    ],
)
def test_what_is_saved(device: str, options: dict[str, object], extra: int) -> None:
    moved = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in options.items()}
    q, k, v, dout = inputs(2, 3, 20, 20, 16, device=device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, unpack):
        out, lse = repro.flash_attention(*leaves, return_lse=True, **moved)  # type: ignore[arg-type]
    wanted = [*leaves, out, lse]
    assert len(packed) == len(wanted) + extra
    pointers = [t.data_ptr() for t in packed]
    assert pointers[:5] == [t.data_ptr() for t in wanted]
    assert all(t.numel() <= max(q.numel(), 40) for t in packed)
    torch.autograd.grad(out, leaves, dout)
    assert len(unpacked) == len(packed)


def test_offloaded(device: str) -> None:
    *leaves, dout = inputs(1, 2, 40, 40, 16, device=device)
    leaves = [t.requires_grad_() for t in leaves]
    options: dict[str, Any] = {"causal": True, "key_mask": torch.arange(40, device=device)[None] < 33}
    plain = torch.autograd.grad(repro.flash_attention(*leaves, **options), leaves, dout)
    with save_on_cpu(pin_memory=device == "cuda"):
        out = repro.flash_attention(*leaves, **options)
    for got, want in zip(torch.autograd.grad(out, leaves, dout), plain, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("only", [0, 1, 2])
def test_gradients_nobody_needs(device: str, only: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.attention import engine
    from repro.attention.options import DIFFERENTIABLE

    asked: list[list[bool]] = []
    real = engine.backward

    def spy(*args: object) -> None:
        asked.append(list(args[-1]))  # type: ignore[call-overload]
        real(*args)  # type: ignore[arg-type]

    q, k, v, dout = inputs(1, 2, 40, 40, 16, device=device)
    want = run(q, k, v, dout)[2:]
    tensors = [q, k, v]
    tensors[only].requires_grad_()
    out = repro.flash_attention(*tensors)
    monkeypatch.setattr(engine, "backward", spy)
    out.backward(dout)  # type: ignore[union-attr]
    assert asked == [[index == only for index in range(3)] + [False] * len(DIFFERENTIABLE)]  # of options
    for index, tensor in enumerate(tensors):
        if index == only:
            assert torch.equal(tensor.grad, want[index])
        else:
            assert tensor.grad is None
