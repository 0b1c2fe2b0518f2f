"""State that changes between a stage's first run and its second is put back, or refused by name."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from repro.checkpointing import plan, plan_blocks

WIDTH = 16


class Stage(nn.Module):
    """A linear layer with something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)


class PrivateGenerators(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.torch_one = torch.Generator().manual_seed(3)
        self.rest = (random.Random(3), np.random.default_rng(3), np.random.RandomState(3))

    def forward(self, x: Tensor) -> Tensor:
        python, new, old = self.rest
        noise = torch.rand(x.shape, generator=self.torch_one)
        return self.lin(x * noise * python.random() * float(new.random()) * float(old.rand()))


NOISE = torch.Generator()
STEPS = itertools.count(1)


class GlobalGenerator(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * torch.rand(x.shape, generator=NOISE))


class Iterator(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * next(STEPS))


class Shuffled(Stage):
    """The same numbers in another order."""

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)[torch.randperm(len(x), generator=NOISE)]


class Length(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.lin(x)] * next(STEPS))


@pytest.mark.parametrize("make", [GlobalGenerator, PrivateGenerators, Iterator, Shuffled, Length])
def test_what_cannot_be_restored_is_noticed(make: type[Stage]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), make(), nn.Tanh())
    x = torch.randn(32, WIDTH)
    planned = plan(model, x, strategy="recompute-all", repeats=0)
    loss = planned(x).square().sum()
    with pytest.raises(RuntimeError, match=rf"stage 3 \({make.__name__}\) (gave another|saved)"):
        loss.backward()


def test_a_difference_that_does_not_matter_can_be_allowed() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), GlobalGenerator(), nn.Tanh())
    x = torch.randn(4, WIDTH)
    planned = plan(model, x, strategy="recompute-all", repeats=0, check_recompute=False)
    planned(x).sum().backward()
    assert model[0].weight.grad is not None


class ClampsItsWeight(Stage):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.lin.weight.clamp_(-0.01, 0.01)
        return self.lin(x)


def test_a_stage_that_writes_to_its_weights_runs_once_or_is_refused() -> None:
    x = torch.randn(4, WIDTH)
    model = nn.Sequential(ClampsItsWeight(), nn.Tanh())
    planned = plan(model, x, strategy="recompute-all", repeats=0)
    with pytest.raises(RuntimeError, match=r"writes to lin\.weight of 1,024 bytes"):
        planned(x)
    plan(model, x, strategy="store-all", repeats=0)(x).sum().backward()
    assert model[0].lin.weight.grad is not None


def test_mode_and_attributes_changed_between_forward_and_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(8, WIDTH)
    planned = plan(model, x, strategy="recompute-all", repeats=0)

    def step(run: nn.Module) -> Tensor:
        model.zero_grad()
        model.train()
        model[1].p = 0.5
        torch.manual_seed(2)
        loss = run(x).sum()
        model.eval()
        model[1].p = 0.1
        loss.backward()
        assert not model[1].training
        assert model[1].p == 0.1
        return model[0].weight.grad.clone()

    assert torch.equal(step(planned), step(model))


@pytest.mark.parametrize("graph", [False, True])
def test_weights_given_for_one_call(graph: bool) -> None:
    """functional_call has put the model's own weights back when backward runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    x = torch.randn(2, WIDTH)
    planned = plan(model, x, strategy="recompute-all", repeats=0)

    def step(run: nn.Module) -> list[Tensor]:
        own = {k: (2 * v.detach()).requires_grad_() for k, v in model.named_parameters()}
        given = {k: v * 1.5 for k, v in own.items()} if graph else own
        functional_call(run, given, (x,)).sum().backward()
        return [v.grad for v in own.values()]

    assert all(torch.equal(a, b) for a, b in zip(step(planned), step(model), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_what_a_stage_replaced_is_not_held_for_the_next_step() -> None:
    """A result that a stage leaves in an attribute goes when the stage leaves another one."""

    class Remembers(Stage):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.detach() * 2
            return self.lin(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Remembers(), nn.Tanh())
    planned = plan(model, torch.ones(2, WIDTH), strategy="recompute-all", repeats=0)
    planned(torch.ones(2, WIDTH)).sum().backward()
    first = weakref.ref(model[1].seen)
    planned(torch.ones(2, WIDTH)).sum().backward()
    gc.collect()
    assert first() is None


class PowerIteration(Stage):
    """Divides by u W u, whose u is a buffer or an untrained parameter and gets other memory."""

    u: Tensor

    def __init__(self, change: str, parameter: bool) -> None:
        super().__init__()
        self.change = change
        if parameter:
            self.u = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        else:
            self.register_buffer("u", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.change != "after its use":
            self._iterate()
        # A graph sees what `u.data = ...` makes of u later, and forbids other writes to it.
        u = self.u.clone() if self.change in ("set_", "copy_") else self.u
        y = self.lin(x) / (1 + (u @ self.lin.weight @ u) ** 2)
        if self.change == "after its use":
            self._iterate()
        return nn.functional.dropout(y, 0.3)

    def _iterate(self) -> None:
        weight = self.lin.weight.detach()
        new = nn.functional.normalize(weight @ self.u.data, dim=0)
        if self.change == "the weight's memory":
            self.u.data = weight[0]
        elif self.change == "set_":
            self.u.set_(new)
        elif self.change == "copy_":
            self.u.copy_(new)
        else:
            self.u.data = new


def _recomputed(model: nn.Sequential, x: Tensor, blocks: bool) -> tuple[nn.Module, AbstractContextManager[None]]:
    if not blocks:
        return plan(model, x, strategy="recompute-all", repeats=0), nullcontext()
    found = plan_blocks(model, (x,), budget_bytes=2**40, blocks=["0", "2"], repeats=0)
    return model, replace(found, recompute=found.keep, keep=()).applied(model)


ORDERS: list[Callable[[list[Tensor]], list[Tensor]]] = [
    lambda losses: losses,
    lambda losses: losses[::-1],
    lambda losses: [torch.stack(losses).prod()],
]


@pytest.mark.parametrize("blocks", [False, True], ids=["stages", "blocks"])
@pytest.mark.parametrize("parameter", [False, True], ids=["buffer", "parameter"])
@pytest.mark.parametrize("change", ["before its use", "after its use", "the weight's memory", "set_", "copy_"])
def test_tensors_that_get_other_memory(change: str, parameter: bool, blocks: bool) -> None:
    """One, two and three open steps, backward in either order or together."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))

    def train(steps: int, order: Callable[[list[Tensor]], list[Tensor]], planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(PowerIteration(change, parameter), nn.Tanh(), PowerIteration(change, parameter))
        before = [value.clone() for value in model.state_dict().values()]
        run, applied = _recomputed(model, x, blocks) if planned else (model, nullcontext())
        assert all(map(torch.equal, model.state_dict().values(), before))  # by planning
        torch.manual_seed(2)
        with applied:
            for loss in order([run((n + 1) * x).square().sum() for n in range(steps)]):
                loss.backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        return [*model.state_dict().values(), *gradients]

    for steps, order in [(1, ORDERS[0]), *itertools.product([2, 3], ORDERS)]:
        expected = train(steps, order, planned=False)
        assert all(map(torch.equal, train(steps, order, planned=True), expected)), steps


def test_memory_that_is_held_for_a_second_run_is_predicted() -> None:
    class Halves(Stage):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(200_000))

        def forward(self, x: Tensor) -> Tensor:
            self.scale.data = self.scale.data / 2
            return self.lin(x) * self.scale[0].clone()

    x = torch.ones(2, WIDTH)
    planned = plan(nn.Sequential(Halves(), nn.Tanh(), Halves()), x, strategy="recompute-all", repeats=0)
    report = planned.verify(x)
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=0.01)
