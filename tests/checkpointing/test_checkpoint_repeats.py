"""What a repeated run is compared by, and what it finds again: fingerprints and random states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from repro.checkpointing import fingerprint
from repro.checkpointing.fingerprint import Prints, difference
from repro.checkpointing.replay import RandomState

SIZES = (1, 7, 4096, fingerprint.STEP_WORDS + 1)


@pytest.fixture(params=["host", "device"])
def elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both hashes, a device's computed here; its tensors are compared there."""
    if request.param == "device":
        monkeypatch.setattr(fingerprint, "_of_host", fingerprint._of_device)
    return str(request.param)


def same(first: Tensor, second: Tensor) -> bool:
    one, other = Prints(()), Prints(())
    one.add([first])
    other.add([second])
    differs, equal = difference(one, other)
    return not differs and (equal is None or bool(equal))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_one_changed_or_moved_element_is_seen(elements: str, size: int, dtype: torch.dtype) -> None:
    values = torch.arange(size).remainder(251).to(dtype)
    assert same(values, values.clone())
    changed = values.clone()
    changed[size // 2] = not bool(changed[size // 2])
    assert not same(values, changed)
    assert not same(values, values.reshape(1, size))
    if size > 1:
        one_hot = torch.zeros_like(values)
        one_hot[1] = 1
        assert not same(one_hot, one_hot.roll(2))
        assert not same(one_hot, one_hot.roll(size // 2 + 1))


def test_patterns_that_plain_sums_do_not_see(elements: str) -> None:
    """Exchanged rows, two signs, all signs, and blocks whose row and column sums stay."""
    torch.manual_seed(0)
    values = torch.randn(64, 64)
    signs = values.clone()
    signs[0, :2] *= -1
    square = values.clone()
    square[:2, :2] = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    turned = square.clone()
    turned[:2, :2] = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    assert not same(values, values.flip(0))
    assert not same(values, signs)
    assert not same(values, -values)
    assert not same(square, turned)
    assert not same(torch.zeros(3), -torch.zeros(3))
    nan = torch.full((3,), float("nan"))
    assert same(nan, nan.clone())


def test_every_layout_is_read_to_its_last_element(elements: str) -> None:
    torch.manual_seed(0)
    base = torch.randn(40, 300, 4)
    kinds = {
        "transposed": lambda t: t.mT,
        "gaps": lambda t: t[::2, 1::3],
        "one column": lambda t: t[..., 1],
        "expanded": lambda t: t[:, :, :1].expand(40, 300, 4),
        "complex": lambda t: torch.view_as_complex(t.view(40, 300, 2, 2)).conj(),
        "sparse": lambda t: t.relu().to_sparse(),
    }
    for kind, view in kinds.items():
        assert same(view(base), view(base.clone())), kind
        for at in ((0, 1, 1), (38, 298, 1)):
            other = base.clone()
            other[at] = 7.0
            if not torch.equal(view(other).to_dense(), view(base).to_dense()):
                assert not same(view(base), view(other)), (kind, at)


def test_a_fingerprint_leaves_the_storage_as_it_is() -> None:
    for size in SIZES:
        tensor = torch.ones(size)
        fingerprint.elements(tensor)
        tensor.untyped_storage().resize_(0)  # as an offload does; NumPy's view would forbid it


def test_the_workspace_of_a_recurrent_layer_is_left_out() -> None:
    """oneDNN's has bytes that nobody wrote; a vector of bytes anywhere else is compared."""
    first, second = torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    for stage, differs in ((torch.nn.LSTM(2, 2), False), (torch.nn.Linear(2, 2), True)):
        one, other = Prints((), stage), Prints((), stage)
        one.add([first])
        other.add([second])
        assert bool(difference(one, other)[0]) == differs


@pytest.mark.parametrize(
    "draw", [np.random.rand, np.random.randn, lambda: np.random.seed(7), lambda: np.random.bytes(1)]
)
def test_an_earlier_state_is_taken_over_only_where_nobody_drew(draw) -> None:  # type: ignore[no-untyped-def]
    kept = np.random.get_state()
    try:
        np.random.seed(3)
        before = RandomState.now(())
        assert RandomState.now((), before) == before
        for _ in range(2):  # the second normal number waits, and changes no word of the state
            draw()
            after = RandomState.now((), before)
            assert after == RandomState.now(())
            assert after != before or draw is not np.random.randn
            before = after
    finally:
        np.random.set_state(kept)
