"""What the head of repro/attention/engine.py says of a call is what happens in a call."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

import pytest
import torch

import repro
from repro.attention import engine


def functions_entered(*call: Any, **options: Any) -> list[str]:
    """Names of the project's functions in the order in which a call enters them."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and re.search(r"\b(repro|kernels)[/\\]", frame.f_code.co_filename):
            seen.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        repro.flash_attention(*call, **options)
    finally:
        sys.setprofile(None)
    return seen


@pytest.fixture
def operands() -> tuple[torch.Tensor, ...]:
    engine.forget()
    return tuple(torch.randn(1, 1, 20, 8, requires_grad=True) for _ in range(3))


#: The functions that the five sentences name, in their order.
NAMED = ("flash_attention", "check_arguments", "forward", "readable", "record", "choose", "replay")


def test_the_head_of_the_engine_names_the_functions_that_a_call_enters(operands) -> None:
    text = " ".join((engine.__doc__ or "").split())
    places = [text.index(f"``{name}``") for name in NAMED[1:]]
    assert places == sorted(places)
    assert len(re.findall(r"(?:^| )\d\. ", text)) == 5
    seen = functions_entered(*operands)
    first = [seen.index(name) for name in NAMED]
    assert first == sorted(first), dict(zip(NAMED, first, strict=True))
    assert seen.index("launch", first[-1]) > first[-1]


def test_a_cached_call_goes_from_the_cache_to_the_replay(operands) -> None:
    repro.flash_attention(*operands)
    seen = functions_entered(*operands)
    assert not {"check_arguments", "readable", "choose", "record"} & set(seen)
    assert "replay" in seen


@pytest.mark.parametrize(
    "options", [{"key_mask": torch.ones(1, 20, dtype=torch.bool)}, {"dropout_p": 0.5, "seed": 1}], ids=["mask", "seed"]
)
def test_calls_with_a_mask_or_a_seed_are_not_cached(operands, options) -> None:
    for _ in range(2):
        assert "record" in functions_entered(*operands, **options)


def test_a_copied_tensor_is_not_cached(operands) -> None:
    strided = torch.randn(1, 1, 20, 16)[..., ::2]
    for _ in range(2):
        seen = functions_entered(strided, *operands[1:])
        assert {"readable", "record"} <= set(seen)
