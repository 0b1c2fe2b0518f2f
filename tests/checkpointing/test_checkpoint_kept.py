"""What stays when a stage has run: tensors that count, changes that are refused, leaks."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planned_stages import build
from planned_training import set_seed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from repro.checkpointing import BlockPlan, InfeasibleBudgetError, peak_bytes, plan, plan_blocks
from repro.training.live_bytes import LiveBytes

WIDTH = 16
OUTSIDE: dict[str, Any] = {"calls": 0}
TICKS = itertools.count(2)


class Attends(nn.Module):
    """A block whose attention map somebody keeps."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.q, self.keep, self.kept = nn.Linear(64, 64), keep, {}

    def forward(self, x: Tensor) -> Tensor:
        a = torch.softmax(torch.tanh(self.q(x)) @ x.mT, -1)
        y = x + a @ x
        if self.keep == "graph":
            self.last = a
        elif self.keep == "detached":
            self.last = a.detach()
        elif self.keep == "half":
            self.last = a.detach().half()
        elif self.keep == "result":
            self.last = y
        elif self.keep == "dict":
            self.kept["a"] = a.detach().clone()
        elif self.keep == "global":
            OUTSIDE[str(id(self))] = a.detach().clone()
        elif self.keep == "dict with graph":
            self.kept["a"] = a
        return y


@pytest.fixture(autouse=True)
def nothing_outside() -> None:
    OUTSIDE.clear()
    OUTSIDE["calls"] = 0


def attends(keep: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Attends(keep) for _ in range(6))), torch.randn(4, 128, 64)


@pytest.mark.parametrize("strategy", ["store-all", "sqrt", "recompute-all"])
@pytest.mark.parametrize("keep", ["", "graph", "detached", "half", "result", "dict", "global"])
def test_what_a_stage_keeps_is_in_the_predicted_peak(keep: str, strategy: str) -> None:
    model, x = attends(keep)
    report = plan(model, x, strategy=strategy, repeats=0).verify(x)
    assert report.equal
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=0.03)
    assert report.measured_peak_bytes <= report.predicted_peak_bytes + 64


@pytest.mark.parametrize("keep", ["graph", "detached", "dict"])
def test_budgets_are_monotone_and_the_least_one_is_accepted(keep: str) -> None:
    model, x = attends(keep)

    def least(budget: int) -> int | None:
        try:
            assert plan(model, x, budget_bytes=budget, repeats=0).predicted_peak_bytes <= budget
        except InfeasibleBudgetError as error:
            return error.smallest_budget_bytes
        return None

    named = least(1)
    assert named is not None
    assert least(named) is None
    assert least(named - 1) == named
    accepted = [least(round(named * share)) is None for share in (0.8, 0.99, 1.01, 1.3, 2)]
    assert accepted == sorted(accepted)


class Counts(nn.Module):
    total = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.lin, self.where, self.seen = nn.Linear(WIDTH, WIDTH), where, []

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "the global OUTSIDE":
            OUTSIDE["calls"] += 1
        elif self.where == "Counts.total":
            Counts.total += 1
        else:
            self.seen.append(1)
        return self.lin(x)


@pytest.mark.parametrize("where", ["the global OUTSIDE", "Counts.total", "Counts.seen"])
def test_changes_that_nobody_puts_back_are_refused_by_name(where: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counts(where), nn.Tanh(), Counts(where))
    x = torch.randn(2, WIDTH)
    with pytest.raises(ValueError, match=rf"stage 2 \(Counts\) changes {where} each time"):
        plan(model, x, strategy="recompute-all", repeats=0)
    plan(model, x, strategy="recompute-all", repeats=0, check_recompute=False)
    plan(model, x, strategy="store-all", repeats=0)(x).sum().backward()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.h = nn.GRUCell(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.cell(x, self.h)
        return self.h


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.past = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x: Tensor) -> Tensor:
        self.past.append(self.lin(x))
        return torch.stack(self.past).sum(0)


class Listed(nn.Module):
    """An embedding, blocks, a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(("make", "place"), [(Recurrent, "h"), (Cached, "past")])
def test_a_stage_that_keeps_its_graph_is_named(make: type[nn.Module], place: str) -> None:
    x = torch.randn(3, WIDTH)
    message = rf"stage {make.__name__} uses a result of an earlier run .*{make.__name__}\.{place}"
    with pytest.raises(RuntimeError, match=message):
        plan(nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Tanh()), x, strategy="sqrt")
    with pytest.raises(RuntimeError, match=message):
        plan_blocks(Listed(make(), make()), x, budget_bytes=10**6)


class GradientScale(nn.Module):
    """The identity forward; backward another factor each time."""

    def forward(self, x: Tensor) -> Tensor:
        z = x * torch.tensor(float(next(TICKS)))
        return x + (z - z.detach())


def test_a_saved_tensor_that_differs_is_seen_where_the_result_is_the_same() -> None:
    x = torch.ones(1, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), GradientScale(), nn.Linear(WIDTH, 1))
    planned = plan(model, x, strategy="recompute-all", repeats=0)
    with pytest.raises(RuntimeError, match=r"stage 2 \(GradientScale\) saved another tensor"):
        planned(x).sum().backward()
    again = plan(model, x, strategy="recompute-all", repeats=0, check_recompute=False)
    again(x).sum().backward()


# -- the same promise of block plans ---------------------------------------------------------------


class Ticking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x) * next(TICKS))


def least_plan(model: nn.Module, x: Tensor) -> BlockPlan:
    names = [f"layers.{i}" for i in range(4)]
    with pytest.raises(InfeasibleBudgetError) as error:
        plan_blocks(model, x, budget_bytes=1, repeats=0, blocks=names)
    return plan_blocks(model, x, budget_bytes=error.value.smallest_budget_bytes, repeats=0, blocks=names)


def all_again(model: nn.Module, x: Tensor) -> BlockPlan:
    """Every block runs again, whether that frees anything or not."""
    found = least_plan(model, x)
    return replace(found, recompute=(*found.recompute, *found.keep), keep=())


@pytest.mark.parametrize("kinds", ["buffer", "noisy", "linear batch-norm tanh", "inner", "spectral"])
def test_blocks_find_their_state_again(kinds: str) -> None:
    x, left = torch.randn(64, WIDTH), []
    for way in ("plain", "applied"):
        model = Listed(*(build(tuple(kinds.split()), WIDTH, seed) for seed in range(4)))
        set_seed(3)
        if way == "plain":
            model(x).square().mean().backward()
        else:
            found = all_again(model, x)
            set_seed(3)
            with found.applied(model):
                model(x).square().mean().backward()
        left.append([*(p.grad for p in model.parameters()), *model.buffers(), torch.rand(2)])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def test_a_block_that_differs_is_named() -> None:
    model, x = Listed(*(Ticking() for _ in range(4))), torch.randn(64, WIDTH)
    found = all_again(model, x)
    with found.applied(model), pytest.raises(RuntimeError, match=r"block layers\.\d \(Ticking\) gave another result"):
        model(x).sum().backward()
    with found.applied(model, check_recompute=False):
        model(x).sum().backward()


# -- leaks -----------------------------------------------------------------------------------------


def backward(run: nn.Module, x: Tensor) -> None:
    run(x).sum().backward()


def dropped(run: nn.Module, x: Tensor) -> None:
    run(x)


def failed(run: nn.Module, x: Tensor) -> None:
    out = run(x)
    out.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()


def checkpointed(run: nn.Module, x: Tensor) -> None:
    checkpoint(run, x, use_reentrant=False).sum().backward()


STEPS = [backward, dropped, failed, checkpointed]
HOOKS = ["hooks", "hooks-size", "hooks-cpu"]


def hooked(kind: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, the same one planned, and an input."""
    x = torch.randn(64, WIDTH)
    model = build(("linear", kind, "tanh", kind), WIDTH, seed=0)
    return model, plan(model, x, strategy="recompute-all", repeats=0), x


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", HOOKS)
def test_no_step_leaves_anything(kind: str, step: Callable[..., None]) -> None:
    """Without the collector of cycles, for which a graph's are none."""
    model, run, x = hooked(kind)
    backward(model, x)
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    backward(run, x)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    gc.collect()
    gc.disable()
    try:
        known = [x, *model.parameters(), *(p.grad for p in model.parameters())]
        with LiveBytes(known=known) as live:
            for _ in range(5):
                step(run, x)
            assert live.live_bytes == 0
    finally:
        gc.enable()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", HOOKS)
def test_a_thousand_steps_take_what_the_first_took(kind: str) -> None:
    """Whole steps, dropped results and failed backwards in turns: bytes, peak and Python objects."""
    model, run, x = hooked(kind)

    def peak() -> int:
        return peak_bytes(lambda: backward(run, x))

    for step in STEPS:
        step(run, x)
    first, objects = peak(), len(gc.get_objects())
    known = [x, *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    with LiveBytes(known=known) as live:
        for number in range(1000):
            STEPS[number % len(STEPS)](run, x)
        gc.collect()
        assert live.live_bytes == 0
    assert peak() == first
    assert len(gc.get_objects()) - objects < 100
