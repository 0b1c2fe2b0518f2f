"""Drawn steps of decoding, whole and split: they pass, and a planted fault is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_support import Problem, failure
from fuzzing import SECONDS, fuzzed
from hypothesis import strategies as st

import repro
from analysis.sums import decode as sums
from repro.attention.decode import decode_attention

PLAIN = Problem(
    seqlens=(40, 70), heads=2, kv_heads=1, seqlen_q=2, head_dim=16, page_size=16, splits=3, fp8=True, scale_block=16
)
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
#: What is compiled into the kernels, for a run that should not compile all the time.
FORMS: list[dict[str, Any]] = [
    {"dtype": FP16, "head_dim": 64},
    {"dtype": FP32, "head_dim": 32, "page_size": 48, "causal": False},
    {"dtype": BF16, "head_dim": 64, "page_size": 48, "fp8": True, "scale_block": 16},
    {"dtype": FP16, "head_dim": 64, "latent": True, "fp8": True, "scale_block": 0},
    {"dtype": BF16, "head_dim": 576, "latent": True, "value_dim": 512, "page_size": 32},
    {"dtype": FP16, "head_dim": 272, "latent": True, "value_dim": 264, "fp8": True, "scale_block": 80},
]
EDGES = [0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 256, 500]
LENGTH = st.integers(1, 700) | st.sampled_from(EDGES) if SECONDS else st.sampled_from(EDGES[:-2])


@st.composite
def any_form(draw: st.DrawFn) -> dict[str, Any]:
    """Whatever the kernels can be compiled with."""
    dtype = draw(st.sampled_from([FP16, BF16, FP32]))
    fp8 = dtype != FP32 and draw(st.booleans())
    unit = 16 if fp8 else 8
    form: dict[str, Any] = {
        "dtype": dtype,
        "fp8": fp8,
        "head_dim": unit * draw(st.integers(1, 256 // unit)),
        "page_size": draw(st.sampled_from([None, 16, 32, 48, 64, 128, 256])),
        "scale_block": draw(st.sampled_from([0, 16, 32, 80, 128])) if fp8 else None,
        "latent": draw(st.booleans()),
        "causal": draw(st.booleans()),
    }
    if form["latent"] and dtype != FP32 and draw(st.booleans()):
        form["head_dim"] = draw(st.sampled_from([576, 272, 512]))
        form["value_dim"] = min(form["head_dim"], draw(st.sampled_from([512, 256, 8])))
    return form


@st.composite
def steps(draw: st.DrawFn, form: dict[str, Any]) -> Problem:
    kv_heads = draw(st.integers(1, 3 if SECONDS else 2))
    lengths = draw(st.lists(LENGTH, min_size=1, max_size=2))
    ragged = bool(form.get("page_size")) or draw(st.booleans())
    return Problem(
        **form,
        seqlens=tuple(lengths if ragged else lengths[:1] * len(lengths)),
        ragged=ragged,
        heads=kv_heads * draw(st.sampled_from([1, 4, 40] if SECONDS else [1, 4, 33])),
        kv_heads=kv_heads,
        seqlen_q=draw(st.integers(1, 8 if SECONDS else 2)),
        transposed=draw(st.booleans()),
        splits=draw(st.sampled_from([1, 2, 3, 5, 16, 100])),
        size=draw(st.sampled_from([1.0, 8.0])),
        seed=draw(st.integers(0, 2**29)),
    )


FORM = any_form() if SECONDS else st.sampled_from(FORMS)


@fuzzed(FORM.flatmap(lambda form: st.lists(steps(form), min_size=1, max_size=4)), examples=16)
def test_any_step_is_as_exact_as_the_framework(problems: list[Problem]) -> None:
    for problem in problems:
        wrong = failure(problem)
        assert wrong is None, f"{wrong}\n  {problem}"


def _doubled(*tensors: Any, **options: Any) -> Any:
    """Scales of keys twice as large as they are."""
    return decode_attention(*tensors, **options | {"k_scale": 2 * options["k_scale"]})


def _lost(*tensors: Any, **options: Any) -> Any:
    """Parts that do not merge: the last key of each sequence is forgotten when there are splits."""
    if options["splits"] > 1:
        options["seqlens_k"] = (options["seqlens_k"] - 1).clamp(min=0)
    return decode_attention(*tensors, **options)


@pytest.mark.parametrize(("wrong", "said"), [(_doubled, "1 splits, sequence 0, "), (_lost, "3 splits, sequence 0, ")])
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Any, said: str) -> None:
    assert failure(PLAIN) is None
    monkeypatch.setattr(repro, "decode_attention", wrong)
    found = failure(PLAIN)
    assert found is not None
    assert found.startswith(said)
    assert "error" in found


def test_a_sum_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "SCALE_UNIT", 8)
    found = failure(PLAIN)
    assert found is not None
    assert "bytes: counted" in found


def test_an_empty_cache_has_scales_of_no_block() -> None:
    """Found by drawing: its scales had the shape of those that a whole head shares."""
    assert (
        failure(Problem(seqlens=(0,), heads=1, kv_heads=1, head_dim=16, ragged=False, fp8=True, scale_block=16)) is None
    )
