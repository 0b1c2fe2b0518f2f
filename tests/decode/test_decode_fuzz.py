"""Random steps of decoding: they pass, and a fault of the kernels, the sums or a scale is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from analysis.sums import decode as sums
from repro import fuzz
from repro.attention import decode_cases, launcher
from repro.attention.decode import decode_attention
from repro.attention.decode_cases import Case, draw, failure, smaller

PLAIN = Case(
    seqlens=(40, 70), heads=2, width=2, page_size=16, ragged=True, splits=3, dtype="bf16", seed=5,
    fp8=True, scale_block=16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def with_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launcher.CHECKS_VARIABLE, "1")


@pytest.mark.parametrize(
    "form", [1, *(pytest.param(form, marks=pytest.mark.thorough) for form in (2, 5))]
)
def test_drawn_steps_pass(form: int) -> None:
    for seed in range(8):
        case = draw(seed, form)
        assert failure(case) is None, case.to_json()


def test_what_is_drawn_covers_the_options() -> None:
    drawn = [draw(seed, seed) for seed in range(300)]
    for name, values in {
        "width": set(range(1, 9)), "fp8": {False, True}, "latent": {False, True},
        "ragged": {False, True}, "dtype": {"fp16", "bf16", "fp32"},
        "page_size": {0, 16, 32, 48, 64, 128, 256}, "scale_block": {0, 16, 32, 80, 128},
    }.items():  # fmt: skip
        assert {getattr(case, name) for case in drawn} == values, name
    assert any(0 in case.lengths for case in drawn)


def test_a_case_is_one_line_to_run_again() -> None:
    assert Case.from_json(PLAIN.to_json()) == PLAIN
    assert fuzz.command(PLAIN, "cpu").startswith("python -m repro.fuzz --of decode --case '{")


def _doubled(*tensors: Any, **options: Any) -> Any:
    """Scales of keys twice as large as they are."""
    return decode_attention(*tensors, **options | {"k_scale": 2 * options["k_scale"]})


def _lost(*tensors: Any, **options: Any) -> Any:
    """Parts that do not merge: the last key of each sequence is forgotten when there are splits."""
    if options["splits"] > 1:
        options["seqlens_k"] = (options["seqlens_k"] - 1).clamp(min=0)
    return decode_attention(*tensors, **options)


@pytest.mark.parametrize(
    ("wrong", "said"), [(_doubled, "1 splits, sequence 0, "), (_lost, "3 splits, sequence 0, ")]
)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Any, said: str) -> None:
    assert failure(PLAIN) is None
    monkeypatch.setattr(decode_cases, "decode_attention", wrong)
    found = failure(PLAIN)
    assert found is not None
    assert found.startswith(said)
    assert "error" in found


def test_a_sum_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "SCALE_UNIT", 8)
    found = failure(PLAIN)
    assert found is not None
    assert "bytes: counted" in found


def test_a_failing_case_gets_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to what the fault needs: here the first split that loses a key."""
    monkeypatch.setattr(decode_cases, "decode_attention", _lost)
    small = fuzz.shrink(replace(PLAIN, latent=True), "cpu", float("inf"))
    assert small.splits == 2
    assert (small.heads, small.width, small.scale_block, small.latent) == (1, 1, 0, False)
    assert len(small.seqlens) == 1
    assert all(len(case.seqlens) >= 1 for case in smaller(small))
    assert torch.tensor(small.lengths).sum() < 110


def test_an_empty_cache_has_scales_of_no_block() -> None:
    """Found by the fuzzer: its scales had the shape of those that a whole head shares."""
    case = Case(seqlens=(0,), fp8=True, scale_block=16)
    assert failure(case) is None
