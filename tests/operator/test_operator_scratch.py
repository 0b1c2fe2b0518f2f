"""Scratch on a GPU comes from torch's allocator: whatever the kernels ask for, it must know.

Nothing here needs a GPU: torch's "meta" device stands for a device that is not the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import attention
from kernels.launch import ITEMSIZE, Array
from kernels.launching.plan import Recorder
from repro.attention.launcher import Launcher
from repro.attention.views import array_of


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_type_of_the_kernels_is_one_of_torch_s(dtype: str) -> None:
    scratch = Launcher(Recorder(), torch.device("meta"))
    array = scratch.empty("scratch", (3, 5), dtype)
    assert (array.dtype, array.shape, array.strides) == (dtype, (3, 5), (5, 1))
    assert scratch.scratch_bytes == 15 * ITEMSIZE[dtype]


@pytest.mark.parametrize("algorithm", attention.ALGORITHMS)
def test_every_algorithm_finds_its_scratch(algorithm: str) -> None:
    """Forward and backward of each, with scratch from torch."""
    recorder = Recorder()
    launcher = Launcher(recorder, torch.device("meta"))
    tensors = [torch.empty(1, 2, 70, 64, dtype=torch.bfloat16) for _ in range(8)]
    names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    arrays = {n: array_of(n, t) for n, t in zip(names, tensors, strict=True)}
    stats: dict[str, Array] = {}
    first: Any = [arrays[n] for n in names[:4]]
    attention.forward(launcher, algorithm, *first, stats, scale=0.125, causal=True)
    attention.backward(
        launcher, algorithm, *first, arrays["dout"], stats, *(arrays[n] for n in names[5:]), scale=0.125, causal=True
    )
    assert len(recorder.launches) >= 2
    assert launcher.scratch_bytes > 0
