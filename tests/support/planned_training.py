"""Training of one case, plain or planned: what each step leaves, bit for bit."""

from __future__ import annotations

import copy
import random as python_random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from planned_stages import build
from torch import Tensor, nn

from analysis.checkpointing import smallest_budget, store_all
from repro.checkpointing.planned import plan
from repro.checkpointing.profiling import profile

WAYS = ("plain", "twice", "retain", "grad", "penalty", "kept")
#: What a plan refuses by name.
REFUSED = ("writes to the model's input", "each time that it runs")
WRAPS = ("ddp", "ddp-unused", "ddp-static", "fsdp2")


@dataclass(frozen=True)
class Case:
    """stages: names of STAGES.  strategy: a planner, or "budget" with the share of the way from the
    smallest budget to storing everything.  autocast: "" (none), "forward" (left before backward) or
    "step".  way: what is done with the result.  restart: the step before which everything is
    saved, built anew and loaded (0: never).  ranks: processes, which train a wrapped model.
    dynamic: "stages" or "around": the stages, or a module that calls the model, are compiled for
    any number of rows, which changes from step to step ("": nothing is compiled).
    """

    stages: tuple[str, ...] = ("linear", "tanh")
    strategy: str = "recompute-all"
    share: float = 0.0
    rows: int = 3
    width: int = 4
    autocast: str = ""
    way: str = "plain"
    input_gradient: bool = False
    between: bool = False
    steps: int = 1
    restart: int = 0
    dynamic: str = ""
    ranks: int = 1
    wrap: str = "ddp"
    seed: int = 0


def train(
    case: Case, device: str, *, planned: bool, wrap: Callable[[nn.Module], nn.Module] = lambda run: run
) -> list[dict[str, Tensor]]:
    """What each step leaves, by name."""
    set_seed(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    inputs = [
        torch.randn(case.rows + (2 * step if case.dynamic else 0), case.width, generator=generator)
        for step in range(case.steps)
    ]

    def make() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        model = build(case.stages, case.width, case.seed).to(device)
        if case.dynamic == "stages":
            compiled: list[Any] = [_compiled(stage) for stage in model]
            model = nn.Sequential(*compiled)
        run = planned_model(case, model, inputs[0].to(device)) if planned else model
        if case.dynamic == "around":
            # The planned model says itself that it is not compiled.
            run = _compiled(_Around(run if planned else torch.compiler.disable(run)))
        parameters = [*model.parameters(), torch.zeros(1, requires_grad=True)]
        return model, wrap(run), torch.optim.SGD(parameters, 0.01, momentum=0.9)

    model, run, optimizer = make()
    found = []
    for step, given in enumerate(inputs):
        if case.restart and step == case.restart:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, run, optimizer = make()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        set_seed(case.seed + step)
        model.zero_grad()
        left = _step(case, run, given.to(device), model)
        left |= {f"random {i}": value for i, value in enumerate(_next_numbers())}
        optimizer.step()
        left |= {name: value.detach().clone() for name, value in model.state_dict().items()}
        found.append(left)
    return found


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager", dynamic=True)


class _Around(nn.Module):
    """Compiled around a model that stays eager."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        out = self.run(x.sin() + x.shape[0])
        return out * 2 if isinstance(out, Tensor) and out.is_floating_point() else out


def _next_numbers() -> list[Tensor]:
    return [torch.rand(2), torch.tensor([python_random.random(), np.random.rand()])]


def _step(case: Case, run: nn.Module, given: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """One forward and backward; results and gradients by name."""
    x = given.requires_grad_() if case.input_gradient else given
    context = _autocast(case, given.device.type)
    left: dict[str, Tensor] = {}
    with context:
        out = run(x)
        loss = loss_of(out)
        if case.way == "twice":
            loss = loss * loss_of(run(2 * x))
        elif case.way == "kept":  # a result that is dropped without a backward
            run(x)
        if case.autocast == "step":
            left |= _backward(case, loss, x, model)
    if case.autocast != "step":
        if case.between:
            _disturb(model)
        left |= _backward(case, loss, x, model)
    left["loss"] = loss.detach()
    if x.grad is not None:
        left["gradient of x"] = x.grad.clone()
    left |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return left


def loss_of(out: Any) -> Tensor:
    leaves = torch.utils._pytree.tree_leaves(out)
    parts = [
        v.float().square().mean() if v.is_floating_point() else v.abs().float().mean()
        for v in leaves
        if isinstance(v, Tensor)
    ]
    return torch.stack(parts).sum()


def _disturb(model: nn.Module) -> None:
    """What a program may do between forward and backward."""
    torch.rand(3)
    python_random.random()
    np.random.rand()
    model.eval()
    model.train()


def _backward(case: Case, loss: Tensor, x: Tensor, model: nn.Module) -> dict[str, Tensor]:
    if not loss.requires_grad:
        return {}
    if case.way == "retain":
        loss.backward(retain_graph=True)
        loss.backward()
    elif case.way in ("grad", "penalty"):
        wanted = [p for p in [x, *model.parameters()] if p.requires_grad]
        penalty = case.way == "penalty"
        grads = torch.autograd.grad(loss, wanted, create_graph=penalty, allow_unused=True)
        parts = [g.float().square().sum() for g in grads if g is not None and g.requires_grad]
        if penalty and parts:
            torch.stack(parts).sum().backward()
        return {f"asked {i}": g.detach().clone() for i, g in enumerate(grads) if g is not None}
    else:
        loss.backward()
    return {}


def set_seed(seed: int) -> None:
    torch.manual_seed(seed)
    python_random.seed(seed)
    np.random.seed(seed % 2**32)


def _autocast(case: Case, device: str) -> Any:
    return torch.autocast(device, torch.bfloat16) if case.autocast else nullcontext()


def planned_model(case: Case, model: nn.Module, x: Tensor) -> nn.Module:
    with _autocast(case, x.device.type):
        if case.strategy != "budget":
            options: dict[str, Any] = {"strategy": case.strategy}
            return plan(model, x, repeats=0, **options)
        found = profile(model, x, repeats=0)
        least, most = smallest_budget(found.chain), store_all(found.chain).peak_bytes
        budget = least + round(case.share * (most - least)) + found.aside_bytes()
        return plan(model, x, budget_bytes=budget, profiled=found)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    """NaN is equal to NaN."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.full_like(tensor, 12345.0), tensor)
