"""Seconds to plan a checkpoint schedule, and how they grow with stages and memory slots.

    pytest tests/bench/bench_planners.py

``checkpoint_schedules`` (binomial schedules of Revolve's kind) stands beside where it is installed
and where its problem, equal steps and a number of states, is the same. Advances and growth
exponents are in ``extra_info``.
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from analysis.checkpointing import (
    Chain,
    OptimalTable,
    Stage,
    chen_search,
    optimal,
    revolve,
    simulate,
    sqrt,
    uniform_chain,
)
from analysis.checkpointing.native import library


def uneven(length: int, kinds: int | None = None) -> Chain:
    """Random stages; with `kinds`, so many different ones, repeated like a network's blocks."""
    rng = np.random.default_rng(length)
    stages = [
        Stage(int(rng.integers(1, 2000)), int(rng.integers(0, 6000)), forward_s=rng.random())
        for _ in range(kinds or length)
    ]
    return Chain(tuple(stages[i % len(stages)] for i in range(length)), 1000)


def budget_of(chain: Chain) -> int:
    """Memory of sqrt(L) segments: a budget that people have."""
    return sqrt(chain).peak_bytes


@pytest.mark.parametrize("length", [100, 300, 1000])
def test_optimal_plan_of_repeated_blocks(benchmark: BenchmarkFixture, length: int) -> None:
    chain = uneven(length, kinds=2)
    table = benchmark.pedantic(lambda: OptimalTable(chain, -(-budget_of(chain) // 500), 500), rounds=1)
    node = table.node(budget_of(chain))
    benchmark.extra_info["subchains"] = len(table.subchains.representatives)
    benchmark.extra_info["advances"] = node.advances if node else None


@pytest.mark.parametrize("length", [100, 200, 400, 1000])
def test_optimal_plan_of_stages_that_all_differ(benchmark: BenchmarkFixture, length: int) -> None:
    if length > 200 and library("float") is None:
        pytest.skip("no C compiler: NumPy takes minutes here")
    chain = uneven(length)
    table = benchmark.pedantic(lambda: OptimalTable(chain, -(-budget_of(chain) // 500), 500), rounds=1)
    node = table.node(budget_of(chain))
    benchmark.extra_info["table_bytes"] = table.rows.nbytes
    benchmark.extra_info["advances"] = node.advances if node else None


@pytest.mark.parametrize("native", [True, False])
def test_numpy_beside_the_compiled_loop(benchmark: BenchmarkFixture, native: bool) -> None:
    chain = uneven(100)
    unit = -(-budget_of(chain) // 500)
    benchmark.pedantic(lambda: OptimalTable(chain, unit, 500, native=native), rounds=1)


def test_growth_in_stages_and_slots(benchmark: BenchmarkFixture) -> None:
    """Exponents: 3 in stages and 1 in slots for stages that all differ."""

    def seconds(length: int, slots: int) -> float:
        chain = uneven(length)
        begin = time.process_time()
        OptimalTable(chain, -(-budget_of(chain) // slots), slots)
        return time.process_time() - begin

    def measure() -> tuple[float, float]:
        stages = seconds(320, 500) / seconds(160, 500)
        slots = seconds(160, 2000) / seconds(160, 500)
        return math.log2(stages), math.log(slots, 4)

    growth = benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info["exponent_stages"], benchmark.extra_info["exponent_slots"] = growth


def test_whole_plan_under_a_budget(benchmark: BenchmarkFixture) -> None:
    """plan, heuristics to compare with, and schedule, for a thousand stages of three kinds."""
    chain = uneven(1000, kinds=3)
    plan = benchmark.pedantic(lambda: optimal(chain, budget_of(chain)), rounds=1)
    assert simulate(chain, plan.schedule).peak_bytes <= budget_of(chain)
    benchmark.extra_info["overhead"] = plan.seconds / (chain.forward_s + chain.backward_s) - 1


def test_chen_search(benchmark: BenchmarkFixture) -> None:
    benchmark(chen_search, uneven(1000))


@pytest.mark.parametrize(("length", "states"), [(100, 5), (1000, 10)])
def test_revolve(benchmark: BenchmarkFixture, length: int, states: int) -> None:
    def plan() -> int:
        return len(revolve(uniform_chain(length), states).schedule)

    benchmark.extra_info["actions"] = benchmark(plan)
    benchmark.extra_info["advances"] = revolve(uniform_chain(length), states).advances


@pytest.mark.parametrize(("length", "states"), [(100, 5), (1000, 10)])
def test_peer_checkpoint_schedules(benchmark: BenchmarkFixture, length: int, states: int) -> None:
    """Their states count the input as ours do; their forward over the last step of each reversal
    tapes it, which is not an advance."""
    peer = pytest.importorskip("checkpoint_schedules", reason="checkpoint_schedules is missing")

    def plan() -> int:
        schedule = peer.MultistageCheckpointSchedule(length, states, 0)
        steps = 0
        for action in schedule:
            if isinstance(action, peer.Forward):
                steps += action.n1 - action.n0
            if isinstance(action, peer.EndReverse):
                break
        return steps

    advances = benchmark(plan) - length
    benchmark.extra_info["advances"] = advances
    assert advances == revolve(uniform_chain(length), states).advances
