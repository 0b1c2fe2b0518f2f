"""Timing on a real device: an empty kernel is short, and more repeats change nothing."""

from __future__ import annotations

import pytest

from kernels.launch import Kernel
from repro.measuring import machine

pytestmark = pytest.mark.skipif(machine.gpu() is None, reason="needs an NVIDIA GPU, none found")

SOURCE = """
#include "device.cuh"
extern "C" __global__ void __launch_bounds__(32) nothing() {}
"""


def test_an_empty_kernel_reads_under_20_microseconds() -> None:
    import torch

    from kernels.launching.cupy_backend import CupyBackend
    from repro.instruments.timing import TorchDevice, time_work

    device, backend = TorchDevice(), CupyBackend()
    kernel = Kernel(SOURCE, "nothing", (("DTYPE", 0),), 32)
    stream = torch.cuda.current_stream().cuda_stream
    timing = time_work(lambda: backend.launch(kernel, (1, 1, 1), 0, [], stream), device, min_repeats=50)
    assert 0 < timing.median_ms < 0.020


def test_twice_the_repeats_move_the_median_by_less_than_a_tenth() -> None:
    import torch

    from repro.instruments.timing import TorchDevice, time_work

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    device = TorchDevice()
    once, twice = (time_work(lambda: a @ a, device, min_repeats=n, max_repeats=n, warmup=10) for n in (40, 80))
    assert once.repeats == 40
    assert twice.repeats == 80
    assert twice.median_ms == pytest.approx(once.median_ms, rel=0.1)
