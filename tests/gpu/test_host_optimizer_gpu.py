"""Optimiser states in host memory for parameters on a GPU: the host's numbers, and torch's.

A copy that starts too early or is not waited for is a wrong number here: the backward has not begun
when step() is called, and the next forward is queued as soon as it returns. Copies that are late on
purpose make it sure; links that leave out a wait show that it is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from repro.measuring import machine
from repro.training.host_optimizer import HostAdamW
from repro.training.link import CudaLink, DirectLink, Ticket

pytestmark = pytest.mark.skipif(machine.gpu() is None, reason="needs an NVIDIA GPU, none found")

STEPS = 20
# Clock cycles of about 10 ms, longer than a forward and a backward take to be queued, and of 1 ms.
BUSY_CYCLES, LATE_CYCLES = 20_000_000, 2_000_000


class Late(CudaLink):
    """Copies wait in their stream for longer than the host takes to go on."""

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> Ticket:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE_CYCLES)
        return super()._copy(stream, source, target)


class Early(CudaLink):
    """Copies do not wait for the computation."""

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> Ticket:
        with torch.cuda.stream(stream):
            return super()._copy(stream, source, target)  # the side stream waits for itself


class _Unwaited:
    def __init__(self, ticket: Ticket) -> None:
        self.done = ticket.done

    def wait(self) -> None:
        pass


class NoWaitForGradients(Late):
    def send(self, source: Tensor, target: Tensor) -> Ticket:
        return _Unwaited(super().send(source, target))


class NoWaitForParameters(Late):
    def fetch(self, source: Tensor, target: Tensor) -> Ticket:
        return _Unwaited(super().fetch(source, target))


class Net(nn.Module):
    """Odd sizes, a parameter that is not contiguous, and a scalar."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype) / shape[-1] ** 0.5

        self.first = nn.Parameter(normal(515, 129))
        self.bias = nn.Parameter(normal(515))
        self.turned = nn.Parameter(normal(515, 1031).t())
        self.last = nn.Parameter(normal(7, 1031))
        self.scale = nn.Parameter(torch.ones((), device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.first.t() + self.bias).tanh()
        return (hidden @ self.turned.t()).tanh() @ self.last.t() * self.scale


def differences(dtype: torch.dtype, bucket_bytes: int, link: CudaLink | None, device: torch.device | str) -> list[str]:
    """What is wrong after one of STEPS steps.

    Both references get the gradients once everything on the device has finished: the same update
    without a device, to the last bit, and torch.optim.AdamW on fp32 copies, whose vectors end
    elsewhere, so each step may differ in the last bit of fp32.
    """
    torch.manual_seed(0)
    net = Net(dtype, device)
    parameters = list(net.parameters())
    assert not net.turned.is_contiguous()
    on_host = [nn.Parameter(p.detach().cpu()) for p in parameters]
    direct = HostAdamW(on_host, bucket_bytes=bucket_bytes, link=DirectLink())
    masters = [p.detach().to(torch.float32, copy=True) for p in on_host]
    torch_adamw = torch.optim.AdamW(masters)
    host = HostAdamW(parameters, bucket_bytes=bucket_bytes, link=link)
    rounding, fp32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps
    found = []
    for step in range(STEPS):
        batches = torch.randn(2, 33, 129, device=device, dtype=dtype)
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            torch.cuda._sleep(BUSY_CYCLES)
        net(batches[0]).float().square().mean().backward()
        gradients = [p.grad.clone() for p in parameters]
        host.step()
        with torch.no_grad():
            after = net(batches[1])
        torch.cuda.synchronize(device)
        for copy, master, gradient in zip(on_host, masters, gradients, strict=True):
            copy.grad, master.grad = gradient.cpu(), gradient.cpu().float()
        direct.step()
        torch_adamw.step()
        for (name, p), copy, master in zip(net.named_parameters(), on_host, masters, strict=True):
            if not torch.equal(p.detach().cpu(), copy.detach()):
                found.append(f"step {step}: {name}")
            error = (p.detach().cpu().float() - master).abs().max()
            if not error <= (rounding + (step + 1) * fp32) * master.abs().max():
                found.append(f"step {step}: {name} is {error} off torch's")
        with torch.no_grad():
            if not torch.equal(after, net(batches[1])):
                found.append(f"step {step}: the next forward")
        if found:
            break
    return found


@pytest.mark.parametrize("make_link", [CudaLink, Late])
@pytest.mark.parametrize("bucket_bytes", [1, 200_000, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_update_without_a_device_and_torch_on_fp32_copies(
    dtype: torch.dtype, bucket_bytes: int, make_link: Callable[[], CudaLink]
) -> None:
    assert differences(dtype, bucket_bytes, make_link(), "cuda") == []


@pytest.mark.parametrize("make_link", [Early, NoWaitForGradients, NoWaitForParameters])
def test_a_missing_wait_is_a_wrong_number(make_link: Callable[[], CudaLink]) -> None:
    """Else the test above would show nothing."""
    assert differences(torch.bfloat16, 1 << 25, make_link(), "cuda") != []


def test_on_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert differences(torch.bfloat16, 200_000, None, torch.device("cuda", 1)) == []
