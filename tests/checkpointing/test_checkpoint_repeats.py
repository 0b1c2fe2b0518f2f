"""What a repeated run is compared by, and what it finds again: fingerprints and random states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from repro.checkpointing.fingerprint import FEW_BYTES, fingerprint, same
from repro.checkpointing.replay import RandomState

SIZES = (1, 7, FEW_BYTES // 4, FEW_BYTES, 4 * FEW_BYTES + 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_one_changed_or_moved_element_is_seen(size: int, dtype: torch.dtype) -> None:
    values = torch.arange(1, size + 1).to(dtype)
    first = fingerprint([values])
    assert same(first, fingerprint([values.clone()]))
    changed = values.clone()
    changed[size // 2] += changed[size // 2].abs() + 1
    assert not same(first, fingerprint([changed]))
    assert not same(first, fingerprint([values.reshape(1, size)]))
    if size > 1:
        assert not same(first, fingerprint([values.flip(0)]))


def test_zeros_of_either_sign_differ_and_nan_is_equal_to_itself() -> None:
    plus, minus = torch.zeros(3), -torch.zeros(3)
    assert not same(fingerprint([plus]), fingerprint([minus]))
    nan = torch.full((3,), float("nan"))
    assert same(fingerprint([nan]), fingerprint([nan.clone()]))


def test_a_fingerprint_leaves_the_storage_as_it_is() -> None:
    for size in SIZES:
        tensor = torch.ones(size)
        fingerprint([tensor])
        tensor.untyped_storage().resize_(0)  # as an offload does; NumPy's view would forbid it


@pytest.mark.parametrize(
    "draw",
    [np.random.rand, np.random.randn, lambda: np.random.seed(7), lambda: np.random.bytes(1)],
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
