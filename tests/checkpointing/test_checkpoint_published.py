"""The released ResNet's chain from shapes against the real network."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from analysis.checkpointing import chen_search, simulate, store_all
from analysis.checkpointing.published import (
    RELEASED_BLOCKS,
    bottleneck_chain,
    bottleneck_parameters,
    kept_bytes,
    scaled_blocks,
)
from repro.checkpointing import profile
from repro.models import BottleneckResNet
from repro.training.saved import count_saved

BLOCKS, BATCH, IMAGE = (1, 2, 2, 1), 2, 96


def test_the_chain_is_the_network_s() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, images = BottleneckResNet(BLOCKS), torch.randn(BATCH, 3, IMAGE, IMAGE)
    formula = bottleneck_chain(BLOCKS, batch=BATCH, image=IMAGE)
    measured = profile(model, images, repeats=0).chain
    assert sum(p.numel() for p in model.parameters()) == bottleneck_parameters(BLOCKS)
    assert len(measured) == len(formula)
    assert measured.input_bytes == formula.input_bytes
    for found, expected in zip(measured.stages, formula.stages, strict=True):
        assert found.activation_bytes == expected.activation_bytes
        assert found.saved_bytes == pytest.approx(expected.saved_bytes, abs=16)
    for planner in (store_all, chen_search):
        peak = simulate(measured, planner(measured).schedule).peak_bytes
        assert planner(formula).peak_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize(("blocks", "pre"), [((1, 1, 1, 1), True), ((1, 1, 1, 1), False), (RELEASED_BLOCKS, False)])
def test_a_forward_without_data_keeps_the_formula_s_bytes(blocks: tuple[int, ...], pre: bool) -> None:
    with FakeTensorMode():
        model = BottleneckResNet(blocks, pre_activation=pre)
        with count_saved(model) as saved:
            model(torch.empty(3, 3, 224, 224))
    assert saved.total_bytes == kept_bytes(blocks, batch=3, pre_activation=pre)


def test_blocks_grow_in_the_released_proportion() -> None:
    assert scaled_blocks(200) == RELEASED_BLOCKS
    found = scaled_blocks(1000)
    assert found == (3, 130, 196, 3)
    assert 997 <= 3 * sum(found) + 2 <= 1000
    with pytest.raises(ValueError, match="layers=28 is below 29"):
        scaled_blocks(28)
    with pytest.raises(ValueError, match=r"blocks=\(3, 24, 36\): need four"):
        BottleneckResNet((3, 24, 36))
