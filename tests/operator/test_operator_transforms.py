"""The operator under the transformations of torch.func."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_support import inputs, run
from torch import Tensor
from torch.func import functionalize, grad, jacrev, jvp, vjp, vmap

import repro

# One key tile: dq is one addition, the same bits in every run.
Q, K, V, DOUT = inputs(2, 2, 16, 16, 8)


@pytest.fixture(autouse=True)
def _batching_is_a_loop() -> Iterator[None]:
    """torch says once that it batches the operator by a loop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def attend(q: Tensor, k: Tensor = K, v: Tensor = V, **options: Any) -> Tensor:
    out = repro.flash_attention(q, k, v, causal=True, **options)
    assert isinstance(out, Tensor)
    return out


def loss(q: Tensor, **options: Any) -> Tensor:
    return (attend(q, **options) * DOUT).sum()


def test_gradients_are_those_of_autograd() -> None:
    expected = run(Q, K, V, DOUT, causal=True)
    out, pull = vjp(attend, Q, K, V)
    assert torch.equal(out, expected.out)
    for got, wanted in zip(pull(DOUT), (expected.dq, expected.dk, expected.dv), strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(grad(loss)(Q), expected.dq)


@pytest.mark.parametrize(
    "options",
    [
        {"key_mask": torch.arange(16)[None].expand(2, 16) < 11},
        {"dropout_p": 0.3, "seed": 4},
        {"window": (5, 2), "sinks": 1},
    ],
    ids=["mask", "dropout", "window"],
)
def test_with_what_a_call_has_for_itself_alone(options: dict[str, Any]) -> None:
    expected = run(Q, K, V, DOUT, causal=True, **options)
    assert torch.equal(grad(lambda q: loss(q, **options))(Q), expected.dq)


def test_packed_sequences() -> None:
    table = torch.tensor([0, 5, 5, 16], dtype=torch.int32)
    q, k, v, dout = (x[:1] for x in (Q, K, V, DOUT))
    options = {"cu_seqlens_q": table, "cu_seqlens_k": table}
    expected = run(q, k, v, dout, causal=True, **options)
    found = grad(lambda q: (attend(q, k, v, **options) * dout).sum())(q)
    assert torch.equal(found, expected.dq)
    many = torch.stack([q, -q])
    batched = vmap(lambda q: attend(q, k, v, **options))(many)
    assert torch.equal(batched, torch.stack([attend(one, k, v, **options) for one in many]))


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


def test_what_has_no_rule_says_so() -> None:
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        grad(lambda q: grad(loss)(q).sum())(Q)
    with pytest.raises(RuntimeError, match="forward-mode derivatives are not supported"):
        jvp(attend, (Q,), (Q,))
