"""Optimiser states on the host: torch's numbers, bytes where the formula puts them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from analysis.model_states import host_optimizer_step
from repro.training.host_optimizer import SLICE, AdamW, HostAdamW, MasterWeightAdamW
from repro.training.link import DirectLink, HostLink
from repro.training.live_bytes import LiveBytes


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)).to(dtype)


def train(net: nn.Module, optimizer, steps: int = 4) -> list[torch.Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(16, 24, dtype=next(net.parameters()).dtype)
        net(x).float().square().mean().backward()
        optimizer.step()
        net.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bucket_bytes", [1, 2000, 1 << 25])
@pytest.mark.parametrize("make_link", [DirectLink, HostLink])
def test_host_and_device_updates_are_bitwise_the_same(dtype, bucket_bytes, make_link) -> None:
    link = make_link()
    net = model(dtype)
    host = HostAdamW(net.parameters(), bucket_bytes=bucket_bytes, link=link)
    on_host = train(net, host)
    net = model(dtype)
    on_device = train(net, MasterWeightAdamW(net.parameters()))
    for ours, theirs in zip(on_host, on_device, strict=True):
        assert torch.equal(ours, theirs)
    if isinstance(link, HostLink):
        link.close()


def test_slices_give_what_the_whole_gives() -> None:
    """More than one slice in a bucket, the last one ragged; torch's own update of all at once."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(n).bfloat16()) for n in (SLICE + 77, SLICE // 2 + 1)]
    masters = [p.detach().float() for p in ours]
    torch_adamw = torch.optim.AdamW(masters, fused=True)
    host = HostAdamW(ours)
    for _ in range(3):
        for p, master in zip(ours, masters, strict=True):
            p.grad = torch.randn_like(p)
            master.grad = p.grad.float()
        host.step()
        torch_adamw.step()
        for p, master in zip(ours, masters, strict=True):
            assert torch.equal(p, master.bfloat16())


def test_tensors_that_are_not_contiguous() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ours = [nn.Parameter(torch.randn(6, 4).t()), nn.Parameter(images), nn.Parameter(torch.ones(()))]
    theirs = copy.deepcopy(ours)
    host, torch_adamw = HostAdamW(ours), torch.optim.AdamW(theirs, fused=True)
    for p, other in zip(ours, theirs, strict=True):
        p.grad = torch.randn_like(p)
        other.grad = p.grad.clone()
    host.step()
    torch_adamw.step()
    assert all(torch.equal(p, other) for p, other in zip(ours, theirs, strict=True))


def test_a_step_makes_no_buffer() -> None:
    parameters = [nn.Parameter(torch.ones(count, dtype=torch.bfloat16)) for count in (300, 500)]
    host = HostAdamW(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    with LiveBytes([*parameters, *(p.grad for p in parameters)]) as live:
        host.step()
    assert live.peak_bytes <= 16, "torch counts its steps in a tensor; nothing grows with the size"


def test_bytes_are_where_the_formula_says() -> None:
    net = model()
    count = sum(p.numel() for p in net.parameters())
    predicted = host_optimizer_step(count, link_bytes_per_s=1, host_bytes_per_s=1)
    link = DirectLink()
    host = HostAdamW(net.parameters(), link=link)
    assert host.state_bytes == predicted.host_bytes
    with LiveBytes(net.parameters()) as live:
        net(torch.randn(16, 24, dtype=torch.bfloat16)).float().square().mean().backward()
        held = sum(p.nbytes + p.grad.nbytes for p in net.parameters())
        assert held == predicted.device_bytes
        host.step()
        assert live.live_bytes == 0, "gradients are freed, no state stays on the device"
    assert (link.bytes_out, link.bytes_in) == (predicted.bytes_out, predicted.bytes_in)
    assert host.pool.live_bytes == predicted.host_bytes + 4 * count  # and two 16-bit buffers


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        HostAdamW([])
    mixed = [torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)]
    with pytest.raises(ValueError, match=r"float32.*bfloat16|bfloat16.*float32"):
        HostAdamW(mixed)
    with pytest.raises(RuntimeError, match="gradient on every parameter"):
        HostAdamW([nn.Parameter(torch.zeros(2))]).step()
    with pytest.raises(ValueError, match="no closure"):
        MasterWeightAdamW([nn.Parameter(torch.zeros(2))]).step(lambda: None)


def test_hyper_parameters_are_used() -> None:
    net = model(torch.float32)
    other = copy.deepcopy(net)
    adam = AdamW(lr=0.1, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2)
    ours = train(net, HostAdamW(net.parameters(), adam))
    theirs = train(other, torch.optim.AdamW(other.parameters(), 0.1, (0.5, 0.6), 1e-3, 0.2, fused=True))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
