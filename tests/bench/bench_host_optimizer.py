"""Seconds and page faults of an Adam update on the host, beside one that widens all at once.

    pytest tests/bench/bench_host_optimizer.py

One thread, one large bf16 tensor, as an embedding is. "whole" keeps its states beside the
parameters, so it copies nothing over a link. How many times the bound of host memory a step took
is in ``extra_info``, for "slices" alone: the bound is of its bytes.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from analysis.model_states import host_optimizer_step
from repro.experiments.checkpointing.training_memory import PARAMETERS, stream_bandwidth
from repro.training.host_optimizer import HostAdamW, MasterWeightAdamW


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["slices", "whole"])
def test_update(benchmark: BenchmarkFixture, name: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(PARAMETERS, dtype=torch.bfloat16))
    optimizer = {"slices": HostAdamW, "whole": MasterWeightAdamW}[name]([parameter])
    faults = []

    def gradient() -> None:
        parameter.grad = torch.ones_like(parameter)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    def step() -> None:
        optimizer.step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    benchmark.pedantic(step, setup=gradient, rounds=10, warmup_rounds=2)
    benchmark.extra_info["page_faults"] = faults[-1] - faults[-2]
    if name == "slices":
        bound = host_optimizer_step(PARAMETERS, link_bytes_per_s=1, host_bytes_per_s=stream_bandwidth()).update_s
        benchmark.extra_info["times_the_bound"] = benchmark.stats.stats.min / bound
