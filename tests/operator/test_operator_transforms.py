"""The operator under transformations of torch.func that the conformance suite does not try."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from attention_support import inputs, run
from torch import Tensor
from torch.func import functionalize, grad, jacrev, vmap

import repro

# One key tile: dq is one addition, the same bits in every run.
Q, K, V, DOUT = inputs(2, 2, 16, 16, 8)


@pytest.fixture(autouse=True)
def _batching_is_a_loop() -> Iterator[None]:
    """torch says once that it batches the operator by a loop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def attend(q: Tensor) -> Tensor:
    out = repro.flash_attention(q, K, V, causal=True)
    assert isinstance(out, Tensor)
    return out


def loss(q: Tensor) -> Tensor:
    return (attend(q) * DOUT).sum()


def test_gradients_are_those_of_autograd() -> None:
    assert torch.equal(grad(loss)(Q), run(Q, K, V, DOUT, causal=True).dq)


def test_batches_of_calls_and_of_gradients() -> None:
    many = torch.stack([Q, 2 * Q, -Q])
    for batched, one in ((attend, attend), (grad(loss), grad(loss))):
        got = vmap(batched)(many)
        assert torch.equal(got, torch.stack([one(q) for q in many]))
    through = grad(lambda many: (vmap(attend)(many) * DOUT).sum())(many)
    assert torch.equal(through, torch.stack([grad(loss)(q) for q in many]))


def test_a_jacobian() -> None:
    rows = jacrev(lambda q: attend(q)[0, 0, 5, :2])(Q)
    for column in range(2):
        assert torch.equal(rows[column], grad(lambda q, c=column: attend(q)[0, 0, 5, c])(Q))


def test_functionalize() -> None:
    assert torch.equal(functionalize(attend)(Q), attend(Q))


def test_second_derivatives_have_no_rule_and_say_so() -> None:
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        grad(lambda q: grad(loss)(q).sum())(Q)
