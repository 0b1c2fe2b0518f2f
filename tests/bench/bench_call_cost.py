"""What a call of the operator costs on the host: dispatch, checks, tensor maps, launches.

    pytest tests/bench/bench_call_cost.py

On a Hopper card: our operator and torch's fused attention, queued without waiting, beside each
other. Without one, our part alone, with the two calls of the driver (making a tensor map,
launching) left out: what of the cost is ours to lower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import repro
from kernels import cupy_backend
from kernels.launch import TENSOR_MAP_BYTES, Array, Kernel
from kernels.prebuild import Recorder
from repro.attention import engine

SIZE = (2, 16, 512, 128)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


class NoDriver(Recorder):
    """A Hopper card's backend up to the driver: arguments are encoded, functions looked up."""

    name = "cupy"
    multiprocessors = 132
    compute_capability = "90"

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[Kernel, int] = {}

    def launch(
        self, kernel: Kernel, grid: Any, shared_bytes: int, args: Any, *rest: Any, **more: Any
    ) -> None:
        self.functions[kernel] = len([cupy_backend.kernel_argument(arg) for arg in args])

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        return engine.array_of(name, torch.empty(shape, dtype=engine._TORCH_TYPES[dtype]))


def operands(device: str) -> list[torch.Tensor]:
    return [torch.randn(SIZE, device=device).bfloat16().requires_grad_() for _ in range(3)]


def calls(qkv: list[torch.Tensor], attention: Callable[..., torch.Tensor]) -> dict[str, Any]:
    out = attention(*qkv)
    dout = torch.ones_like(out)
    return {
        "forward": lambda: attention(*qkv),
        "backward": lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True),
    }


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_our_part_of_a_call(
    benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch, pass_: str
) -> None:
    tensor_map = np.zeros(1, np.dtype((np.void, TENSOR_MAP_BYTES)))
    monkeypatch.setattr(cupy_backend, "_driver_tensor_map", lambda *geometry: tensor_map)
    backend = NoDriver()
    monkeypatch.setattr(engine, "_host", lambda checks: backend)
    call = calls(operands("cpu"), lambda *qkv: repro.flash_attention(*qkv, causal=True))[pass_]
    benchmark(call)
    assert all("sm90" in kernel.entry for kernel in backend.functions)


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("name", ["ours", "torch"])
def test_a_call_on_a_card(benchmark: BenchmarkFixture, name: str, pass_: str) -> None:
    attention: Callable[..., torch.Tensor] = {
        "ours": lambda *qkv: repro.flash_attention(*qkv, causal=True),
        "torch": lambda *qkv: torch.nn.functional.scaled_dot_product_attention(
            *qkv, is_causal=True
        ),
    }[name]
    call = calls(operands("cuda"), attention)[pass_]
    # Few enough calls a round that the queue does not fill and make the host wait.
    benchmark.pedantic(
        lambda: [call() for _ in range(50)], rounds=20, warmup_rounds=2,
        setup=torch.cuda.synchronize,
    )  # fmt: skip
    benchmark.extra_info["us_a_call"] = benchmark.stats.stats.median / 50 * 1e6
