"""Every option through torch: kept calls, compiled, recomputed, transformed, cast, as a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_case import Call, call_of
from features import FEATURES, SIXTEEN_BITS, small
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import repro
from repro.attention import engine

EACH = pytest.mark.parametrize("feature", FEATURES)
#: Options that the module takes when it is made.
OF_THE_MODULE = ("causal", "dropout_p", "scale", "softcap", "deterministic", "tile", "order", "window", "sinks")


def results(call: Call, attend: Any = repro.flash_attention) -> list[Tensor]:
    """out and the gradients of what asks for one."""
    leaves = call.leaves()
    out = call(*leaves, attend=attend)
    wanted = [x for x in leaves if x.requires_grad]
    return [out.detach(), *(torch.autograd.grad(out, wanted, call.dout) if wanted else ())]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@EACH
def test_a_kept_call_reads_what_it_is_given(feature: str) -> None:
    """The second call of a layout is replayed: with the numbers, masks and tables of its own."""
    first, second = (call_of(small(feature, seed=seed)) for seed in (1, 2))
    engine.forget()
    want = results(second)
    engine.forget()
    results(first)
    same(results(second), want)
    same(results(second), want)
    engine.forget()


@EACH
def test_compiled(feature: str) -> None:
    call = call_of(small(feature))
    torch._dynamo.reset()
    compiled = torch.compile(repro.flash_attention, backend="aot_eager", fullgraph=True)
    same(results(call, compiled), results(call))


@EACH
def test_recomputed(feature: str) -> None:
    def recomputed(*tensors: Tensor, **options: Any) -> Any:
        return checkpoint(repro.flash_attention, *tensors, use_reentrant=False, **options)

    call = call_of(small(feature))
    same(results(call, recomputed), results(call))


@EACH
def test_transformed(feature: str) -> None:
    """vjp is autograd's; vmap is a call for each."""
    call = call_of(small(feature))
    want = results(call)
    leaves = [x.detach() for x in call.leaves()]
    if len(want) > 1:
        out, pull = torch.func.vjp(call, *leaves)
        same([out, *pull(call.dout)], want)
    many = torch.stack([leaves[0], -leaves[0]])
    batched = torch.func.vmap(lambda q: call(q, *leaves[1:]))(many)
    same(list(batched), [call(q, *leaves[1:]) for q in many])


@EACH
def test_cast(feature: str) -> None:
    """Under autocast everything is cast with q; gradients are of the type that was given."""
    call = call_of(small(feature))
    if feature in SIXTEEN_BITS:
        pytest.skip("e4m3 is not cast")
    leaves = call.leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = call(*leaves)
    assert out.dtype == torch.bfloat16
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert grad.dtype == torch.float32


@EACH
def test_in_the_module(feature: str) -> None:
    """In eval mode, where nothing is dropped."""
    if feature in SIXTEEN_BITS:
        pytest.skip("a module holds no scales")

    def module(*tensors: Tensor, seed: int, **options: Any) -> Any:
        made = repro.FlashAttention(**{name: options.pop(name) for name in OF_THE_MODULE})
        return made.eval()(*tensors, **options)

    call = call_of(small(feature))
    kept = call_of(small(feature, dropout_p=0.0))
    same(results(call, module), results(kept))
