"""Chains by formula against chains measured on the real models, and peaks of whole steps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from analysis.checkpointing import Chain, chen_recursive, simulate, sqrt, store_all
from analysis.checkpointing.networks import gpt_chain, lstm_chain, mlp_chain, resnet_chain
from repro.checkpointing import profile
from repro.models import GPT, MLPChain, PreActivationResNet, UnrolledLSTM

Case = tuple[nn.Module, tuple[Tensor, ...], Chain]


def mlp() -> Case:
    return MLPChain(12, 64), (torch.randn(512, 64),), mlp_chain(12, 64, 512)


def resnet() -> Case:
    # The CPU's convolutions pad channels to as many as a vector holds, up to 16, in a copy.
    model = PreActivationResNet(26, width=16)
    return model, (torch.randn(4, 3, 32, 32),), resnet_chain(26, 16, 4, 32)


def lstm() -> Case:
    sizes = {"batch": 32, "layers": 3, "hidden": 64, "classes": 50}
    model = UnrolledLSTM(20, **sizes)
    return model, model.initial_state(), lstm_chain(20, **sizes)


def gpt() -> Case:
    sizes = {"hidden": 64, "heads": 4, "seqlen": 128, "vocabulary": 256}
    model = GPT(4, dropout=0.0, stage="sublayer", **sizes)
    return model, (torch.randint(256, (4, 128)),), gpt_chain(4, batch=4, **sizes)


@pytest.mark.parametrize("make", [mlp, resnet, lstm, gpt])
def test_outputs_and_interiors_follow_from_shapes(make: Callable[[], Case]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, state, formula = make()
    measured = profile(model, state, repeats=0).chain
    assert len(measured) == len(formula)
    assert measured.input_bytes == formula.input_bytes
    for index, (found, expected) in enumerate(zip(measured.stages, formula.stages, strict=True)):
        assert found.activation_bytes == expected.activation_bytes, index
        if expected.kind != "loss":
            assert found.saved_bytes == pytest.approx(expected.saved_bytes, rel=0.01, abs=600)
    # Steps of an LSTM share their weights: a step's weight gradient is a temporary beside the sum
    # so far. The profile runs one step alone, where it becomes the sum itself and is no temporary.
    pairs = zip(measured.stages, formula.stages, strict=True)
    beside = max(b.backward_temporary_bytes - a.backward_temporary_bytes if b.kind == "step" else 0 for a, b in pairs)
    for planner in (store_all, sqrt, chen_recursive):
        peak = simulate(measured, planner(measured).schedule).peak_bytes + beside
        assert planner(formula).peak_bytes == pytest.approx(peak, rel=0.08), planner.__name__
