"""Offloading saved tensors: same gradients, the predicted bytes, nothing copied needlessly."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from repro.training.link import DirectLink, HostLink, Pool
from repro.training.live_bytes import LiveBytes
from repro.training.offload import OffloadSavedTensors, resident_tensors


def mlp(width: int = 32, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)


def gradients(model: nn.Module, x: Tensor, offload: OffloadSavedTensors | None) -> list[Tensor]:
    model = copy.deepcopy(model)
    x = x.detach().requires_grad_()
    if offload is None:
        loss = model(x).square().sum()
    else:
        offload._resident |= {p.untyped_storage()._cdata for p in resident_tensors(model)}
        with offload:
            loss = model(x).square().sum()
    loss.backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    assert all(g is not None for g in grads)
    return [g for g in grads if g is not None]


@pytest.fixture(params=["direct", "threads", "paced"])
def link(request: pytest.FixtureRequest):
    made = {"direct": DirectLink, "threads": HostLink, "paced": lambda: HostLink(2e8)}
    one = made[request.param]()
    yield one
    if isinstance(one, HostLink):
        one.close()


@pytest.mark.parametrize("prefetch_bytes", [0, 5000, 1 << 30])
def test_gradients_bitwise_equal_and_bytes_as_predicted(link, prefetch_bytes: int) -> None:
    rows, width, depth = 8, 32, 3
    model, x = mlp(width, depth), torch.randn(rows, width)
    offload = OffloadSavedTensors(model, link=link, prefetch_bytes=prefetch_bytes)
    moved = gradients(model, x, offload)
    for ours, plain in zip(moved, gradients(model, x, None), strict=True):
        assert torch.equal(ours, plain)
    # By hand: a linear saves its input, a GELU saves its input, square saves the last output. The
    # input of layer i + 1 is the output of GELU i, so 2 * depth activations and the final one.
    activations = rows * width * 4
    assert link.bytes_out == (2 * depth + 1) * activations
    assert link.bytes_in == link.bytes_out
    assert offload.kept > 0, "weights are saved by linear layers and must not move"


def test_views_broadcasts_and_small_slices() -> None:
    def moved(make) -> tuple[int, int]:
        link = DirectLink()
        with OffloadSavedTensors(link=link) as offload:
            total = make()
        total.backward()
        return link.bytes_out, offload.moved

    base = torch.randn(64, 64, requires_grad=True)
    a, one = torch.randn(64, 64), torch.randn(64, requires_grad=True)
    # a and its transpose are one storage; both products save it
    assert moved(lambda: (base @ a).sum() + (base @ a.t()).sum()) == (a.nbytes, 1)
    # a broadcast row (stride 0) is its 64 elements, not 64 x 64
    row = torch.randn(64)
    assert moved(lambda: (base * row.expand(64, 64)).sum()) == (row.nbytes, 1)
    # 4 of 1024 rows: the span moves, not the whole storage
    wide = torch.randn(1024, 64)
    assert moved(lambda: (one * wide[8:12]).sum()) == (4 * 64 * 4, 1)


def test_a_freed_storage_whose_address_returns_is_another_storage() -> None:
    link = DirectLink()
    x = torch.ones(1000, requires_grad=True)
    y = x
    with OffloadSavedTensors(link=link):
        for i in range(8):  # each intermediate is freed once it has moved, addresses come back
            y = torch.exp(y * (0.1 + i / 100))
    loss = y.sum()
    loss.backward()
    plain = torch.ones(1000, requires_grad=True)
    z = plain
    for i in range(8):
        z = torch.exp(z * (0.1 + i / 100))
    z.sum().backward()
    assert torch.equal(x.grad, plain.grad)
    assert link.bytes_out == 8 * 4000


def test_device_memory_is_freed_and_the_host_pool_counts() -> None:
    width, depth, rows = 64, 6, 256
    model, x = mlp(width, depth), torch.randn(rows, width)
    activation = rows * width * 4
    pool = Pool()
    offload = OffloadSavedTensors(model, link=DirectLink(), pool=pool, prefetch_bytes=0)
    with LiveBytes([x, *model.parameters()]) as live:
        with offload:
            y = model(x)
        after_forward = live.live_bytes
        assert after_forward == activation, "only the output is left on the device"
        assert pool.live_bytes == 2 * depth * activation
        y.sum().backward()
    del y
    assert pool.live_bytes == 0
    assert pool.held_bytes == 2 * depth * activation
    assert pool.peak_bytes == 2 * depth * activation


def test_second_step_uses_the_same_buffers() -> None:
    model, x = mlp(), torch.randn(8, 32)
    offload = OffloadSavedTensors(model, link=DirectLink())
    held = []
    for _ in range(3):
        with offload:
            loss = model(x).sum()
        loss.backward()
        del loss
        held.append(offload.pool.held_bytes)
    assert held[0] == held[1] == held[2] > 0
    assert len(offload._order) <= offload.moved / 3, "finished graphs are forgotten"


def test_backward_twice_over_a_kept_graph() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    link = DirectLink()
    with OffloadSavedTensors(link=link):
        y = torch.tanh(x).exp().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    y.backward()
    assert torch.equal(first, x.grad)
    assert link.bytes_in == 2 * link.bytes_out


def test_a_graph_dropped_half_way_gives_everything_back() -> None:
    """Slots that were fetched ahead and never used wait for their copies and free their buffers."""
    link = HostLink(2e7)
    pool = Pool()
    x = torch.randn(20_000, requires_grad=True)
    with OffloadSavedTensors(link=link, pool=pool):
        first = x.exp()
        second = first.exp().exp()
    torch.autograd.grad(second, first, torch.ones_like(second))  # leaves the first exp unused
    del first, second
    assert pool.live_bytes == 0
    link.close()


def test_in_place_writes_are_still_errors() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    with OffloadSavedTensors([weight]):
        y = functional.linear(x, weight).sum()
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified in place.*version 1, expected version 0"):
        y.backward()


def test_write_while_a_copy_is_under_way_is_an_error() -> None:
    link = HostLink(1e6)
    x = torch.randn(20_000, requires_grad=True)
    with OffloadSavedTensors(link=link):
        y = x * 2
        z = y.exp()  # saves z; the copy takes 80 ms
        loss = z.sum()
    z.detach().zero_()
    with pytest.raises(RuntimeError, match="while it was being copied out"):
        loss.backward()
    link.close()


def test_in_flight_bound_makes_the_computation_wait() -> None:
    link = HostLink(4e6)
    x = torch.randn(10_000, requires_grad=True)
    offload = OffloadSavedTensors(link=link, in_flight_bytes=50_000)
    with offload:
        y = x
        for _ in range(4):
            y = y.exp()
            assert sum(entry[1] for entry in offload._leaving) <= 50_000
    offload.wait()
    link.close()


def test_errors_of_the_copy_thread_reach_the_caller() -> None:
    link = HostLink()
    one_place = torch.zeros(1, dtype=torch.uint8).expand(4)
    ticket = link.send(torch.zeros(4, dtype=torch.uint8), one_place)
    with pytest.raises(RuntimeError, match="memory location"):
        ticket.wait()
    link.close()


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_bad_arguments(bad: float) -> None:
    with pytest.raises(ValueError, match=str(bad)):
        HostLink(bad)
    with pytest.raises(ValueError, match="min_bytes=-1 is below 0"):
        OffloadSavedTensors(min_bytes=-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_side_stream_values_and_memory() -> None:
    model, x = mlp(1024, 8).cuda(), torch.randn(4096, 1024, device="cuda")
    plain = gradients(model, x, None)
    torch.cuda.reset_peak_memory_stats()
    offload = OffloadSavedTensors(model, prefetch_bytes=1 << 25, in_flight_bytes=1 << 25)
    for ours, expected in zip(gradients(model, x, offload), plain, strict=True):
        assert torch.equal(ours, expected)
    assert offload.pool.pin
