"""What a planned step costs beside autograd's and beside ``torch.utils.checkpoint``.

    pytest tests/bench/bench_checkpoint_executor.py

Stages of a fraction of a millisecond (`gpt`: larger ones), so that the work around them shows; the
steps of all take turns in one process. Storing everything runs nothing twice: what it takes more
than autograd is the executor's own. A plan runs with and without the hash of results and saved
tensors, whose cost is the difference. A plan and torch's checkpoint have the same segments of about
the square root of the chain, and each runs all but the last again. Ratios of medians, and
microseconds a stage above autograd, are in ``extra_info`` and printed at the end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from analysis.checkpointing import every, store_all
from repro.checkpointing import PlannedModel
from repro.checkpointing.peers import segmented
from repro.experiments.shared.checkpoint import case

CHAINS = {"mlp": 64, "resnet": 128, "lstm": 256, "gpt": 14}
TURNS = 15


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def step(run: Callable[..., Any], state: tuple[torch.Tensor, ...]) -> float:
    """Seconds of the computing thread for one forward and backward."""
    begin = time.process_time()
    found = run(*state)
    (found[0] if isinstance(found, tuple) else found).backward()
    return time.process_time() - begin


@pytest.mark.parametrize("model", CHAINS)
def test_executor_over_autograd(benchmark: BenchmarkFixture, model: str) -> None:
    found = case(model, CHAINS[model])
    chain = found.profiled.chain
    size = round(len(chain) ** 0.5)
    runs = {
        "autograd": found.model,
        "store-all": found.planned(store_all(chain)),
        "plan": found.planned(every(chain, stages=size)),
        "plan that compares nothing": PlannedModel(
            found.model, found.profiled, every(chain, stages=size).schedule, check_recompute=False
        ),
        "torch.utils.checkpoint": segmented(list(found.profiled.stages), size),
    }
    for parameter in found.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)

    def turn() -> None:
        names.append(names.pop(0))  # another one first each time
        for name in names:
            seconds[name].append(step(runs[name], found.state))

    benchmark.pedantic(turn, rounds=TURNS, warmup_rounds=2)
    medians = {name: statistics.median(values[2:]) for name, values in seconds.items()}
    plain = medians.pop("autograd")
    for name, median in medians.items():
        above = (median - plain) / len(chain) * 1e6
        benchmark.extra_info[f"{name} / autograd"] = round(median / plain, 3)
        print(f"\n{model}: {name} {median / plain:.2f} of autograd, {above:.0f} us a stage above")
