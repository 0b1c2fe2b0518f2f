"""Weights that autocast casts belong to the peak of a planned step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from repro.checkpointing import InfeasibleBudgetError, peak_bytes, plan
from repro.models.sequential import MeanSquare

CAST = 6 * 2 * 128 * 512 * 2 + 6 * (512 + 128) * 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6)), MeanSquare()
    )


def autocast(on: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=on)


def measured(run: nn.Module, x: Tensor, *, inside: bool) -> int:
    """Peak of a step whose backward runs inside autocast's context or after it."""
    for parameter in run.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        with autocast():
            loss = run(x)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()

    return peak_bytes(step) + x.nbytes


@pytest.mark.parametrize("strategy", ["store-all", "recompute-all", "sqrt"])
def test_the_peak_is_not_above_the_prediction(strategy: str) -> None:
    net, x = model(), torch.randn(256, 128)
    with autocast():
        run = plan(net, x, strategy=strategy, repeats=0)
    assert run.profiled.cast_bytes == CAST
    for inside in (False, True):
        peak = measured(run, x, inside=inside)
        assert peak <= 1.01 * run.predicted_peak_bytes
        assert peak >= run.predicted_peak_bytes - CAST
    if strategy == "store-all":
        assert peak == pytest.approx(run.predicted_peak_bytes, rel=0.02)


def test_a_budget_is_kept() -> None:
    net, x = model(), torch.randn(256, 128)
    with autocast():
        with pytest.raises(InfeasibleBudgetError) as error:
            plan(net, x, budget_bytes=2_000_000, repeats=0)
        least = error.value.smallest_budget_bytes
        assert least > CAST
        for budget in (least, 4_000_000):
            run = plan(net, x, budget_bytes=budget, repeats=0)
            assert run.predicted_peak_bytes <= budget
            for inside in (False, True):
                assert measured(run, x, inside=inside) <= budget + 4  # the loss, which the caller names
        assert plan(net, x, budget_bytes=8_000_000, repeats=0).predicted.advances == 0


def test_shared_weights_are_cast_once_and_again_where_a_stage_runs_again() -> None:
    torch.manual_seed(0)
    one = nn.Linear(256, 256)
    stages = [nn.Sequential(one, nn.GELU()) for _ in range(6)]
    net, x = nn.Sequential(*stages, MeanSquare()), torch.randn(64, 256)
    with autocast():
        run = plan(net, x, strategy="recompute-all", repeats=0)
        store = plan(net, x, strategy="store-all", repeats=0)
    assert run.profiled.cast_bytes == 2 * (256 * 256 + 256)
    for planned in (run, store):
        for inside in (False, True):
            peak = measured(planned, x, inside=inside)
            assert peak <= 1.01 * planned.predicted_peak_bytes


def test_planned_without_and_trained_with_autocast_warns_once() -> None:
    net, x = model(), torch.randn(8, 128)
    run = plan(net, x, strategy="sqrt", repeats=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x)
    with autocast(), pytest.warns(UserWarning, match=r"no autocast, trained under cpu autocast to torch\.bfl"):
        run(x)
    with autocast(), warnings.catch_warnings():
        warnings.simplefilter("error")
        out = run(x)
    out.float().sum().backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with autocast():
        out = net(x)
    out.float().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, net.parameters(), strict=True))


def test_profiling_inside_autocast_leaves_weights_that_were_cast_trainable() -> None:
    """A cast made without gradients must not stay in autocast's cache."""
    net, x = model(), torch.randn(8, 128)
    with autocast():
        plan(net, x, strategy="sqrt", repeats=0)
        net(x).float().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
