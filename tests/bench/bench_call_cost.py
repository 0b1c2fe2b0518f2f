"""What a call of the operator costs on the host: dispatch, checks, tensor maps, launches.

    pytest tests/bench/bench_call_cost.py

On a Hopper card: our operator and torch's fused attention, queued without waiting, beside each
other. Without one, our operator as on a card up to the driver, which does nothing and takes no
time: what of the cost is ours to lower. Beside it torch's attention on CPU tensors of one row: what
passing through its dispatcher costs, with hardly any work behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fake_driver
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import repro
from kernels.launching.cupy_backend import CupyBackend
from repro.attention import launcher

SIZE = (2, 16, 512, 128)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.fixture(scope="module")
def card() -> Iterator[CupyBackend]:
    """A Hopper card's backend on a driver that does nothing, in charge of CPU tensors."""
    if torch.cuda.is_available():
        pytest.skip("this process has a driver")
    fake_driver.install()
    backend = CupyBackend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "_host", lambda checks: backend)
        yield backend


def operands(device: str) -> list[torch.Tensor]:
    return [torch.randn(SIZE, device=device).bfloat16().requires_grad_() for _ in range(3)]


def calls(qkv: list[torch.Tensor], attention: Callable[..., torch.Tensor]) -> dict[str, Any]:
    out = attention(*qkv)
    dout = torch.ones_like(out)
    constants = [tensor.detach() for tensor in qkv]
    return {
        "forward": lambda: attention(*qkv),
        "no grad": lambda: attention(*constants),
        "backward": lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True),
    }


@pytest.mark.parametrize("pass_", ["forward", "backward", "no grad"])
def test_our_part_of_a_call(benchmark: BenchmarkFixture, card: CupyBackend, pass_: str) -> None:
    call = calls(operands("cpu"), lambda *qkv: repro.flash_attention(*qkv, causal=True))[pass_]
    benchmark(call)


@pytest.mark.parametrize("pass_", ["forward", "backward", "no grad"])
def test_torch_s_dispatcher(benchmark: BenchmarkFixture, pass_: str) -> None:
    one_row = [t.detach()[:1, :1, :1].clone().requires_grad_() for t in operands("cpu")]
    benchmark(calls(one_row, torch.nn.functional.scaled_dot_product_attention)[pass_])


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("name", ["ours", "torch"])
def test_a_call_on_a_card(benchmark: BenchmarkFixture, name: str, pass_: str) -> None:
    attention: Callable[..., torch.Tensor] = {
        "ours": lambda *qkv: repro.flash_attention(*qkv, causal=True),
        "torch": lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True),
    }[name]
    call = calls(operands("cuda"), attention)[pass_]
    # Few enough calls a round that the queue does not fill and make the host wait.
    benchmark.pedantic(lambda: [call() for _ in range(50)], rounds=20, warmup_rounds=2, setup=torch.cuda.synchronize)
    benchmark.extra_info["us_a_call"] = benchmark.stats.stats.median / 50 * 1e6
