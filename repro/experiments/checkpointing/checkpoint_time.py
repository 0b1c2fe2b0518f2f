"""What the sublinear plan costs in time at sizes of Chen et al. 2016, Fig. 7, beside autograd.

The ResNet is the authors' released one, 200 layers at 224 x 224, two images instead of 32; the LSTM
is the paper's own, 4 x 1024, batch 64, at its shortest, 64 steps. One thread. A stage takes a tenth
of a second here, so the executor's own work, at most a millisecond a stage, does not decide, as it
does on the small chains of checkpoint-depth (tests/bench/bench_checkpoint_executor.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from analysis.checkpointing import Chain, Plan, chen_search, store_all
from analysis.checkpointing.networks import lstm_chain
from analysis.checkpointing.published import IMAGE, RELEASED_BLOCKS, bottleneck_chain
from repro.experiments import Cell, Context, Experiment, Row

if TYPE_CHECKING:
    from torch import Tensor, nn

    from repro.checkpointing.profiling import Profile

IMAGES, STEPS = 2, 64
#: The plan is what is judged; storing everything shows the executor's own work.
REPEATS = {"store-all": 3, "chen-search": 5}
DEPTHS = {"resnet": 200, "lstm": STEPS}
LSTM = {"batch": 64, "layers": 4, "hidden": 1024, "classes": 5000}
PLANS = {"store-all": store_all, "chen-search": chen_search}


def cells() -> list[Cell]:
    """Storing everything, which shows the executor's own cost, and the sublinear plan."""
    return [Cell(implementation=plan, model=model, depth=depth) for model, depth in DEPTHS.items() for plan in PLANS]


def chain_of(model: str) -> Chain:
    """The chain from shapes, times in units of work: a backward takes two forwards."""
    if model == "resnet":
        return bottleneck_chain(RELEASED_BLOCKS, batch=IMAGES)
    return lstm_chain(STEPS, **LSTM)


def plan_of(cell: Cell) -> Plan:
    return PLANS[str(cell["implementation"])](chain_of(str(cell["model"])))


def predict(cell: Cell) -> Iterator[Row]:
    """Peak, stage forwards and time relative to storing everything."""
    from repro.experiments.shared.checkpoint import predicted_rows

    for found in predicted_rows(cell, chain_of(str(cell["model"])), plan_of(cell)):
        if found["metric"] != "peak_bytes":  # chen-resnet and checkpoint-depth predict bytes
            yield found


def _built(model: str) -> tuple[nn.Module, tuple[Tensor, ...], Profile]:
    """Model, input, and the profile that its shapes give: nothing of it is measured."""
    import torch

    from repro.checkpointing.profiling import Profile
    from repro.models import BottleneckResNet, UnrolledLSTM

    torch.manual_seed(0)
    chain = chain_of(model)
    if model == "resnet":
        net = BottleneckResNet(RELEASED_BLOCKS)
        return net, (torch.randn(IMAGES, 3, IMAGE, IMAGE),), Profile(chain, tuple(net.stages()))
    lstm = UnrolledLSTM(STEPS, device="cpu", **LSTM)
    profiled = Profile(chain, tuple(lstm.stages()), shared=tuple(lstm.parameters()))
    return lstm, lstm.initial_state(), profiled


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """A metered step and timed ones, in turns with autograd's."""
    import torch

    from repro.checkpointing import PlannedModel
    from repro.experiments.shared.checkpoint import forwards_row, measure_step, of_step, rows

    torch.set_num_threads(1)
    model, state, profiled = _built(str(cell["model"]))
    planned = PlannedModel(model, profiled, plan_of(cell).schedule)
    step = measure_step(
        planned, model, state, baseline=model, seconds=math.inf, repeats=REPEATS[str(cell["implementation"])]
    )
    yield from rows(step, where="cpu")
    yield from of_step([forwards_row(planned)])


EXPERIMENT = Experiment(
    "checkpoint-time",
    cells,
    predict,
    measure,
    device="cpu",
    sources=("analysis/checkpointing", "repro/checkpointing", "repro/models"),
    seconds=300,
    on_demand=True,
)
