"""Mixed precision: saved bytes as predicted by tensor, and fp16 needs its loss scaled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from analysis.mixed_precision import autocast_break_even_tokens, saved_under
from analysis.parallel_activations import LayerShape
from repro.distributed.parallel_layer import ParallelTransformerLayer
from repro.training.accumulation import accumulate_gradients
from repro.training.saved import count_saved


def saved(shape: LayerShape, policy: str) -> int:
    torch.manual_seed(0)
    layer = ParallelTransformerLayer(shape.hidden, shape.heads)
    if policy == "16-bit":
        layer.bfloat16()
    dtype = torch.bfloat16 if policy == "16-bit" else torch.float32
    x = torch.randn(shape.seqlen, shape.batch, shape.hidden, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=policy == "autocast"), count_saved(layer) as found:
        out = layer(x)
    del out
    return found.total_bytes


@pytest.mark.parametrize("policy", ["fp32", "16-bit", "autocast"])
@pytest.mark.parametrize(
    "shape",
    [LayerShape(16, 2, 64, 4), LayerShape(48, 3, 32, 2), LayerShape(32, 1, 64, 4)],
    ids=["wide", "long", "batch of one"],
)
def test_saved_bytes_by_policy(shape: LayerShape, policy: str) -> None:
    assert saved(shape, policy) == sum(saved_under(shape, policy).values())


def test_autocast_saves_bytes_only_above_a_number_of_tokens() -> None:
    shape = LayerShape(16, 1, 64, 4)
    tokens = autocast_break_even_tokens(shape)
    assert tokens > shape.seqlen
    for batch, smaller in ((tokens // 16, True), (tokens // 16 - 1, False)):
        probe = LayerShape(16, batch, 64, 4)
        assert (saved(probe, "autocast") < saved(probe, "fp32")) is smaller


def tiny_gradient(scaler: torch.amp.GradScaler | None) -> torch.Tensor:
    """d/dw of w · 1e-9 · 4 in fp16: below the least subnormal, 6e-8, unless the loss is scaled."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return functional_linear(batch, weight).float().sum() * 1e-9

    accumulate_gradients([torch.ones(4, 4)], loss, lambda b: 1, scaler)
    if scaler is not None:
        scaler.unscale_(optimizer)
    assert weight.grad is not None
    return weight.grad


def functional_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, weight[None])


def test_fp16_gradients_underflow_without_loss_scaling() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    assert torch.count_nonzero(tiny_gradient(None)) == 0
    # 6.55e-5 has 10 bits of fraction left as an fp16 subnormal's neighbour: relative error 2^-9
    torch.testing.assert_close(tiny_gradient(scaler), torch.full((4,), 4e-9), rtol=2**-9, atol=0)


def test_overflow_skips_the_step_and_halves_the_scale() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return functional_linear(batch, weight).float().sum()

    accumulate_gradients([torch.full((1, 2), 8.0)], loss, lambda b: 1, scaler)  # 2^16·8 > 65504
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.ones(2))
    assert scaler.get_scale() == 2.0**15


def test_bad_policy() -> None:
    with pytest.raises(ValueError, match="got 'fp8'"):
        saved_under(LayerShape(8, 1, 8, 2), "fp8")
