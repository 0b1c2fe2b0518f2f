"""Planned models on several ranks: DistributedDataParallel and FSDP2 see an ordinary graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from planned_case import failure
from planned_training import WRAPS, Case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import repro


@pytest.mark.parametrize("strategy", ["store-all", "recompute-all", "sqrt"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_planned_models_train_as_plain_ones_do(wrap: str, strategy: str) -> None:
    """Called twice before one backward, and with a parameter that is not used where that may be."""
    third = "unused" if wrap == "ddp-unused" else "tanh"
    stages = ("linear", "dropout", third, "batch-norm", "linear")
    case = Case(stages=stages, strategy=strategy, rows=8, way="twice", steps=2, ranks=2, wrap=wrap)
    assert failure(case) is None


def test_stages_may_be_sharded_before_planning_and_the_whole_only_after_it() -> None:
    """The advice of the refusal, followed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, gradients = torch.randn(4, 16), []
        for sharded in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
            if sharded:
                for stage in model:
                    fully_shard(stage, mesh=mesh)
            planned = repro.plan(model, x, strategy="sqrt")
            if sharded:
                fully_shard(model, mesh=mesh)
                with pytest.raises(ValueError, match="only then call fully_shard on the whole"):
                    repro.plan(model, x, strategy="sqrt")
            planned(x).square().sum().backward()
            found = [parameter.grad for parameter in model.parameters()]
            gradients.append([g.full_tensor() if sharded else g for g in found])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    finally:
        dist.destroy_process_group()
