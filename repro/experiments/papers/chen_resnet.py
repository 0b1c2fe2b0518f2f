"""The 1,000-layer ResNet of Chen et al. 2016 at its published size: what a step keeps, and at most.

Without recomputation the step needs more memory than this machine has. So its forward runs on
tensors that have a shape and no data, and autograd's saved tensors are counted; a batch of 2 is
executed beside it. The sublinear plan is executed at the full batch of 32 images of 224 x 224: some
nineteen TFLOP, the longest measurement here. The plan is made on the chain of formulas, so what is
predicted has seen no measurement.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from analysis.checkpointing import chen_search, store_all
from analysis.checkpointing.published import (
    BATCH,
    FP32,
    IMAGE,
    bottleneck_chain,
    bottleneck_parameters,
    kept_bytes,
    scaled_blocks,
)
from repro.experiments import Cell, Context, Experiment, Row, row

if TYPE_CHECKING:
    from repro.models import BottleneckResNet

PLAN, PRE = "chen-search", "autograd, pre-activation"
SMALL_BATCH = 2


def cells() -> list[Cell]:
    """Counted without data at 200 and 1,000 layers, executed at a small batch, then the plan."""
    wanted = [
        ("autograd", 200, BATCH),
        ("autograd", 1000, BATCH),
        (PRE, 1000, BATCH),
        ("autograd", 1000, SMALL_BATCH),
        (PLAN, 1000, BATCH),
    ]
    return [Cell(implementation=i, depth=depth, batch=batch) for i, depth, batch in wanted]


def predict(cell: Cell) -> Iterator[Row]:
    """Sums over the stages, and the plan's peak by the simulator."""
    name, batch = str(cell["implementation"]), int(cell["batch"])
    blocks = scaled_blocks(int(cell["depth"]))
    found = {"parameter_bytes": FP32 * bottleneck_parameters(blocks)}
    if name != PRE:
        chain = bottleneck_chain(blocks, batch=batch)
        plan = chen_search(chain) if name == PLAN else store_all(chain)
        found["peak_bytes"] = plan.peak_bytes
    if name != PLAN:
        found["alive_after_forward_bytes"] = kept_bytes(blocks, batch=batch, pre_activation=name == PRE)
    for metric, value in found.items():
        yield row(metric, value, tool="chain of shapes")


def _build(cell: Cell) -> BottleneckResNet:
    from repro.models import BottleneckResNet

    return BottleneckResNet(scaled_blocks(int(cell["depth"])), pre_activation=cell["implementation"] == PRE)


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """Counted where nothing is computed, metered where the step runs."""
    import torch

    both = {"pass_": "forward+backward"}
    name, batch = str(cell["implementation"]), int(cell["batch"])
    if name != PLAN and batch == BATCH:
        from torch._subclasses.fake_tensor import FakeTensorMode

        from repro.training.saved import count_saved

        with FakeTensorMode():
            model, images = _build(cell), torch.empty(batch, 3, IMAGE, IMAGE)
            with count_saved(model) as saved:
                model(images)
        tool = "saved-tensor hooks; tensors without data"
        yield row("alive_after_forward_bytes", saved.total_bytes, tool=tool, **both)
        return
    from repro.checkpointing import PlannedModel
    from repro.checkpointing.profiling import Profile
    from repro.experiments.shared.checkpoint import TOOL, measure_step

    torch.set_num_threads(os.cpu_count() or 1)  # bytes do not depend on it
    torch.manual_seed(0)
    model = _build(cell)
    images = torch.randn(batch, 3, IMAGE, IMAGE)
    run: torch.nn.Module = model
    if name == PLAN:
        chain = bottleneck_chain(scaled_blocks(int(cell["depth"])), batch=batch)
        plan = chen_search(chain)
        run = PlannedModel(model, Profile(chain, tuple(model.stages())), plan.schedule, name=name)
    step = measure_step(run, model, (images,), repeats=0)
    yield row("peak_bytes", step.peak_bytes, tool=TOOL["cpu"], **both)
    yield row("alive_after_forward_bytes", step.saved_bytes, tool=TOOL["cpu"], **both)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    yield row("parameter_bytes", weights, tool="sum over the model's parameters", **both)


EXPERIMENT = Experiment(
    "chen-resnet",
    cells,
    predict,
    measure,
    device="cpu",
    sources=("analysis/checkpointing", "repro/checkpointing", "repro/models"),
    seconds=600,
    timed=False,
    on_demand=True,
)
