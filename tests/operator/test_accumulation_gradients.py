"""Gradient accumulation gives the large batch's gradient, uneven micro-batches included."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from repro.training.accumulation import accumulate_gradients
from repro.training.live_bytes import LiveBytes

IGNORED = -100


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5)).to(dtype)


def data(rows: int = 29) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(5, (rows,))
    labels[torch.randperm(rows)[: rows // 3]] = IGNORED
    return torch.randn(rows, 12, dtype=torch.float64), labels


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.detach().double().clone() for p in net.parameters() if p.grad is not None]


def accumulated(net: nn.Module, x: Tensor, y: Tensor, size: int, scaler=None) -> tuple:
    net = copy.deepcopy(net)
    loss = accumulate_gradients(
        list(zip(x.split(size), y.split(size), strict=True)),
        lambda b: functional.cross_entropy(net(b[0]), b[1], ignore_index=IGNORED, reduction="sum"),
        lambda b: int((b[1] != IGNORED).sum()),
        scaler,
    )
    return loss, gradients(net)


def large_batch(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    net = copy.deepcopy(net)
    loss = functional.cross_entropy(net(x), y, ignore_index=IGNORED)
    loss.backward()
    return loss.detach(), gradients(net)


@pytest.mark.parametrize("size", [1, 4, 7, 29])
def test_equals_the_large_batch_in_float64(size: int) -> None:
    net, (x, y) = network(torch.float64), data()
    want_loss, want = large_batch(net, x, y)
    loss, got = accumulated(net, x, y, size)
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-14)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-14 * b.abs().max() * len(x)


@pytest.mark.parametrize("size", [1, 4, 7])
def test_fp32_error_is_at_most_twice_the_large_batch_error(size: int) -> None:
    x, y = data()

    def error(got: list[Tensor]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(got, exact, strict=True))

    single = network(torch.float32)
    # both start from the same fp32 weights; the float64 reference must too
    reference = copy.deepcopy(single).double()
    _, exact = large_batch(reference, x.float().double(), y)
    large = error(large_batch(single, x.float(), y)[1])
    assert error(accumulated(single, x.float(), y, size)[1]) <= 2 * large + 1e-9


def test_bitwise_equal_where_sums_are_exact() -> None:
    """Small integers: every partial sum is exact, so the order of summation cannot matter."""
    torch.manual_seed(2)
    net = nn.Linear(6, 3, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.randint(-3, 4, (3, 6)))
    x = torch.randint(-3, 4, (16, 6)).float()  # 16 rows: the mean divides by a power of two
    whole = copy.deepcopy(net)
    whole(x).square().sum(1).mean().backward()
    accumulate_gradients(list(x.split(5)), lambda b: net(b).square().sum(), len)
    assert torch.equal(net.weight.grad, whole.weight.grad)


def test_dividing_by_the_number_of_micro_batches_is_wrong_when_uneven() -> None:
    net, (x, y) = network(torch.float64), data()
    _, want = large_batch(net, x, y)
    noted = copy.deepcopy(net)  # the study notes' loop (note 004, section 3)
    pieces = list(zip(x.split(7), y.split(7), strict=True))
    for xb, yb in pieces:
        loss = functional.cross_entropy(noted(xb), yb, ignore_index=IGNORED) / len(pieces)
        loss.backward()
    _, ours = accumulated(net, x, y, 7)
    wrong = max(float((a - b).abs().max()) for a, b in zip(gradients(noted), want, strict=True))
    right = max(float((a - b).abs().max()) for a, b in zip(ours, want, strict=True))
    assert right < 1e-15 < 1e-3 < wrong


def test_a_micro_batch_without_terms_is_skipped() -> None:
    net, (x, y) = network(torch.float64), data()
    y[:4] = IGNORED
    want_loss, want = large_batch(net, x, y)
    loss, got = accumulated(net, x, y, 4)
    assert torch.isfinite(loss)
    assert float(loss) == pytest.approx(float(want_loss))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_saved_bytes_fall_with_the_micro_batch() -> None:
    """Peak above parameters and gradients: proportional to the micro-batch's rows."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())))
    x = torch.randn(256, 32)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    peaks = {}
    for pieces in (1, 2, 4, 8):
        known = [x, *net.parameters(), *(p.grad for p in net.parameters())]
        with LiveBytes(known) as live:
            accumulate_gradients(list(x.chunk(pieces)), lambda b: net(b).square().sum(), len)
        peaks[pieces] = live.peak_bytes
    weights = 4 * (32 * 32 + 32)  # gradients of one layer before they are added
    rows = {n: (peaks[n] - weights) / (256 // n) for n in peaks}
    assert max(rows.values()) <= 1.35 * min(rows.values())
    assert peaks[8] < peaks[4] < peaks[2] < peaks[1]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="no micro-batches"):
        accumulate_gradients([], lambda b: b, len)
    with pytest.raises(ValueError, match=r"\[0, 0\]"):
        accumulate_gradients([1, 2], lambda b: torch.zeros(()), lambda b: 0)
