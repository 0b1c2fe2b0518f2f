"""Bytes without matrix products: the same as with them, and no 16-bit product is computed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from repro import experiments
from repro.checkpointing import memory_meter
from repro.distributed.parallel_layer import ParallelTransformerLayer
from repro.experiments import Context
from repro.instruments.without_products import FACTORS, WithoutProducts
from repro.models import GPT
from repro.training.saved import count_saved


class SixteenBitProducts(TorchDispatchMode):
    """Counts the products of 16-bit matrices that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += func in FACTORS and args[0].dtype in (torch.bfloat16, torch.float16)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("granularity", ["none", "attention core", "each block"])
def test_a_step_takes_the_same_bytes(granularity: str) -> None:
    found = []
    for mode in (nullcontext(), WithoutProducts()):
        torch.manual_seed(0)
        model = GPT(2, hidden=32, heads=4, seqlen=24, granularity=granularity)
        ids = torch.randint(256, (3, 24))
        model(ids)  # makes the causal mask, which all models of this length share
        with mode, memory_meter("cpu") as meter, meter.region("step") as step:
            with meter.region("forward") as forward:
                loss = model(ids)
            loss.backward()
        gradients = [p.grad.nbytes for p in model.parameters()]
        found.append((step.peak_bytes, step.end_bytes, forward.end_bytes, gradients))
    assert found[0] == found[1]


def test_results_have_shape_type_and_strides_of_the_product() -> None:
    a, b = torch.randn(2, 5, 3), torch.randn(2, 3, 7)
    for dtype in (torch.float32, torch.bfloat16):
        x, y = a.to(dtype), b.to(dtype)
        calls = (
            lambda x=x, y=y: x @ y,
            lambda x=x, y=y: x[0] @ y[0],
            lambda x=x, y=y: torch.nn.functional.linear(x, y[0].mT, y[0, 0]),
            lambda x=x, y=y: torch.baddbmm(x.new_ones(2, 5, 7), x, y),
        )
        for call in calls:
            wanted = call()
            with WithoutProducts():
                found = call()
            assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
            assert not found.any()
            assert wanted.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_saves_the_same_storages(dtype: torch.dtype) -> None:
    found = []
    for mode in (nullcontext(), WithoutProducts()):
        torch.manual_seed(0)
        layer = ParallelTransformerLayer(32, 4).to(dtype)
        x = torch.randn(16, 2, 32, dtype=dtype, requires_grad=True)
        with mode, count_saved(layer) as saved:
            layer(x)
        found.append((saved.by_dtype, saved.tensors))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("checkpoint-layer-bytes", {"implementation": "none", "seqlen_q": 64}),
        ("checkpoint-layer-bytes", {"implementation": "full", "seqlen_q": 64}),
        ("training-memory", {"policy": "16-bit", "batch": 1}),
        ("training-memory", {"policy": "autocast", "batch": 1}),
    ],
)
def test_experiments_about_bytes_compute_no_16_bit_product(name: str, wanted: dict[str, Any]) -> None:
    one = experiments.experiment(name)
    assert one.measure is not None
    cell = next(c for c in one.cells() if wanted.items() <= c.items())
    with SixteenBitProducts() as products:
        measured = list(one.measured(cell, Context("cpu")))
    assert products.count == 0
    predicted = {r.metric: r.value for r in one.predicted(cell)}
    for row in measured:
        assert row.value == pytest.approx(predicted[row.metric], rel=0.06)
