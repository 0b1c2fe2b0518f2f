"""State that changes between a stage's first run and its second is put back, or refused by name."""

from __future__ import annotations

import gc
import itertools
import random
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from repro.checkpointing import plan

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
