"""What the checkpointing experiments share: models by name, one measured step, its rows.

A cell names a model and its depth, and a strategy as ``implementation``. Sizes are small enough for
two CPU cores; ``REPRO_CHECKPOINT_SCALE=large`` chooses the papers' sizes, on a GPU where there is
one. Cells of that scale say so (a field ``scale``), and their records are in the GPU's folder.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from analysis.checkpointing import Chain, Plan
from analysis.checkpointing.networks import gpt_chain, lstm_chain, lstm_shared_bytes, mlp_chain, resnet_chain
from repro.experiments import SMALL, Cell, Row, row, spread
from repro.measuring import machine

if TYPE_CHECKING:
    from torch import Tensor, nn

    from repro.checkpointing import PlannedModel, Profile

SOURCES = ("analysis/checkpointing", "repro/checkpointing", "repro/models")
SCALE = os.environ.get("REPRO_CHECKPOINT_SCALE", SMALL)
if SCALE not in (SMALL, "large"):
    raise ValueError(f"REPRO_CHECKPOINT_SCALE={SCALE!r} is neither 'small' nor 'large'")

#: Sizes of a model apart from its depth.
SIZES: dict[str, dict[str, int]] = {
    "mlp": {"width": 64, "rows": 512},
    "resnet": {"width": 8, "batch": 2, "image": 16},
    "lstm": {"batch": 16, "layers": 1, "hidden": 32, "classes": 32},
    "gpt": {"batch": 4, "seqlen": 128, "hidden": 64, "heads": 4, "vocabulary": 128},
}
if SCALE == "large":  # Chen et al. 2016, section 5: ResNet batch 32 at 224, LSTM 4 x 1024, batch 64
    SIZES |= {
        "mlp": {"width": 4096, "rows": 4096},
        "resnet": {"width": 16, "batch": 32, "image": 224},
        "lstm": {"batch": 64, "layers": 4, "hidden": 1024, "classes": 5000},
        "gpt": {"batch": 8, "seqlen": 1024, "hidden": 1024, "heads": 16, "vocabulary": 50304},
    }


def formula(model: str, depth: int) -> Chain:
    """The chain of a model from its shapes; depth in layers (mlp, resnet, gpt) or steps (lstm)."""
    sizes: dict[str, Any] = SIZES[model]
    if model == "mlp":
        return mlp_chain(depth, **sizes)
    if model == "resnet":
        return resnet_chain(depth, **sizes)
    if model == "lstm":
        return lstm_chain(depth, **sizes)
    if model == "gpt":
        return gpt_chain(depth, **sizes)
    raise ValueError(f"model {model!r} is not one of {sorted(SIZES)}")


def shared_bytes(model: str) -> int:
    """What a planned step holds beside its chain: gradients of parameters that stages share."""
    if model != "lstm":
        return 0
    return lstm_shared_bytes(**{k: v for k, v in SIZES["lstm"].items() if k != "batch"})


def plan_for(chain: Chain, strategy: str, budget_bytes: int | None = None) -> Plan:
    """A plan by the names that records carry: a strategy of repro.checkpointing, or
    "optimal-at-sqrt", the fastest plan in the memory that sqrt(L) takes."""
    from analysis import checkpointing as theory

    if strategy == "optimal-at-sqrt":
        return theory.optimal(chain, theory.sqrt(chain).peak_bytes)
    if strategy == "optimal":
        assert budget_bytes is not None
        return theory.optimal(chain, budget_bytes)
    if strategy == "greedy":
        assert budget_bytes is not None
        return theory.greedy(chain, budget_bytes)
    if strategy.startswith("every-"):
        return theory.every(chain, int(strategy.removeprefix("every-")))
    if strategy.startswith("uniform-"):
        return theory.uniform(chain, int(strategy.removeprefix("uniform-")))
    if strategy.startswith("revolve-"):
        return theory.revolve(chain, int(strategy.removeprefix("revolve-")))
    planners: dict[str, Callable[[Chain], Plan]] = {
        "store-all": theory.store_all,
        "recompute-all": theory.recompute_all,
        "sqrt": theory.sqrt,
        "exponential": theory.exponential,
        "exponential-recursive": theory.exponential_recursive,
        "recursive": theory.chen_recursive,
        "chen-search": theory.chen_search,
    }
    return planners[strategy](chain)


def device() -> str:
    """ "cuda" where the large sizes were asked for and there is a GPU, else "cpu"."""
    return "cuda" if SCALE == "large" and machine.gpu() is not None else "cpu"


def scaled(cells: Iterable[Cell]) -> list[Cell]:
    """The cells of the chosen scale: another scale is another cell, with records of its own."""
    return [Cell(**one) if SCALE == SMALL else Cell(**one, scale=SCALE) for one in cells]


def build(model: str, depth: int, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model with fixed weights and its input."""
    import torch

    from repro.models import GPT, MLPChain, PreActivationResNet, UnrolledLSTM

    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES[model]
    where = device()
    if model == "mlp":
        return MLPChain(depth, sizes["width"]).to(where), (torch.randn(sizes["rows"], sizes["width"], device=where),)
    if model == "resnet":
        image = sizes["image"]
        return PreActivationResNet(depth, sizes["width"]).to(where), (
            torch.randn(sizes["batch"], 3, image, image, device=where),
        )
    if model == "lstm":
        lstm = UnrolledLSTM(depth, device=where, **sizes)
        return lstm, lstm.initial_state()
    shape = {name: value for name, value in sizes.items() if name != "batch"}
    gpt = GPT(depth, dropout=0.0, stage="sublayer", **shape, **options).to(where)
    ids = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["seqlen"]), device=where)
    return gpt, (ids,)


@dataclass(frozen=True)
class Case:
    """A model, its input and its profile."""

    model: nn.Module
    state: tuple[Tensor, ...]
    profiled: Profile

    def planned(self, plan: Plan) -> PlannedModel:
        from repro.checkpointing import PlannedModel

        return PlannedModel(self.model, self.profiled, plan.schedule, name=plan.name)


@lru_cache(maxsize=1)  # cells of one model follow each other
def case(model: str, depth: int, repeats: int = 0) -> Case:
    """The model on this machine, profiled; times are measured with repeats > 0 only."""
    import torch

    from repro.checkpointing import profile

    torch.set_num_threads(1)
    module, state = build(model, depth)
    return Case(module, state, profile(module, state, repeats=repeats))


@dataclass(frozen=True)
class Step:
    """Peak bytes of one training step, what was alive after its forward, seconds of several, the
    share that the forward had, and seconds of the baseline's step beside each."""

    peak_bytes: int
    saved_bytes: int
    seconds: list[float]
    forward_share: list[float]
    baseline: list[float]


def measure_step(
    run: Callable[..., Tensor],
    model: nn.Module,
    state: tuple[Tensor, ...],
    *,
    baseline: Callable[..., Tensor] | None = None,
    repeats: int = 5,
    seconds: float = 1.0,
) -> Step:
    """A metered step, which also warms up, then timed steps: `repeats`, or after `seconds` three.

    Steps of `baseline` alternate with them, now before and now after: what else goes on in the
    machine slows neighbours alike, and a clock that falls or rises favours neither. Bytes include
    the input; parameters and their gradients are there before.
    """
    import torch

    from repro.checkpointing import memory_meter
    from repro.checkpointing.values import storage_bytes

    where = state[0].device
    # One thread computes on the CPU, and its own seconds do not depend on who else runs.
    clock = time.perf_counter if where.type == "cuda" else time.process_time
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def now() -> float:
        if where.type == "cuda":
            torch.cuda.synchronize()
        return clock()

    def timed(step: Callable[..., Tensor]) -> tuple[float, float]:
        """Seconds of a step and of its forward."""
        begin = now()
        loss = step(*state)
        middle = now()
        loss.backward()
        return now() - begin, middle - begin

    if where.type == "cuda":
        timed(run)  # workspaces that stay
    with memory_meter(where) as meter, meter.region("step") as step:
        with meter.region("forward") as forward:
            loss = run(*state)
        loss.backward()
    del loss
    times: list[float] = []
    shares: list[float] = []
    before: list[float] = []
    while len(times) < repeats and (len(times) < min(3, repeats) or sum(times) < seconds):
        second = len(times) % 2 == 1
        if baseline is not None and not second:
            before.append(timed(baseline)[0])
        total, first = timed(run)
        times.append(total)
        shares.append(first / total)
        if baseline is not None and second:
            before.append(timed(baseline)[0])
    inputs = storage_bytes(state)
    return Step(step.peak_bytes + inputs, forward.end_bytes + inputs, times, shares, before)


CLOCK = {"cpu": "seconds of the one computing thread", "cuda": "wall clock"}
TOOL = {"cpu": "profiler's allocation trace", "cuda": "allocator's requested bytes"}


def rows(step: Step, *, where: str | None = None) -> Iterator[Row]:
    """Peak, bytes alive after the forward, and seconds of a step measured `where` (None: on the
    chosen scale's device)."""
    where = where or device()
    clock, seconds = CLOCK[where], statistics.median(step.seconds)
    found = [
        row("peak_bytes", step.peak_bytes, tool=TOOL[where]),
        row("alive_after_forward_bytes", step.saved_bytes, tool=TOOL[where]),
        row("time_s", seconds, **spread(step.seconds), tool=f"{clock}, median"),
        row("forward_share", statistics.median(step.forward_share), tool=clock),
    ]
    if step.baseline:
        pairs = [own / other for own, other in zip(step.seconds, step.baseline, strict=True)]
        other = statistics.median(step.baseline)
        turns = {"tool": f"{clock}, in turns", "against": "autograd"}
        found.append(row("baseline_time_s", other, **spread(step.baseline), **turns))
        # The quotient of the two medians, so that the three rows agree.
        found.append(row("relative_time", seconds / other, **spread(pairs), **turns))
    yield from of_step(found)


def of_step(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows as those of a forward and a backward pass together."""
    for one in rows:
        yield one | {"pass": "forward+backward"}


def planned_rows(one: Case, plan: Plan, *, baseline: Callable[..., Tensor] | None = None, **how: Any) -> Iterator[Row]:
    """Rows of a step that follows `plan`, made for the profiled chain: what the simulator says for
    that chain, what is measured, and how often stages ran. Time is relative to `baseline`, which is
    autograd on the model where none is given."""
    planned = one.planned(plan)
    step = measure_step(planned, one.model, one.state, baseline=baseline or one.model, **how)
    yield from rows(step)
    yield from of_step(
        [
            forwards_row(planned),
            row("profiled_peak_bytes", planned.predicted_peak_bytes, tool="simulator on the chain profiled here"),
        ]
    )


def forwards_row(planned: PlannedModel) -> Row:
    """How often stages ran in the last step."""
    assert planned.last_run is not None
    return row("stage_forwards", sum(planned.last_run.forwards), tool="executor's count")


def predicted_rows(cell: Cell, chain: Chain, plan: Plan) -> Iterator[Row]:
    """What formulas say: peak, stage forwards, and time relative to storing everything."""
    found = {
        "peak_bytes": plan.peak_bytes + shared_bytes(str(cell["model"])),
        "stage_forwards": plan.forwards,
        "relative_time": plan.seconds / (chain.forward_s + chain.backward_s),
    }
    yield from of_step(row(metric, value, tool="plan on the chain of formulas") for metric, value in found.items())
