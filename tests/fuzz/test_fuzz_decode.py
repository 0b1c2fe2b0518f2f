"""Drawn steps of decoding, whole and split: they pass, and a planted fault is found."""

from __future__ import annotations

from typing import Any

import decode_case
import pytest
from decode_case import Case, failure
from fuzzing import SECONDS, fuzzed
from hypothesis import strategies as st

from analysis.sums import decode as sums
from repro.attention.decode import decode_attention

PLAIN = Case(
    seqlens=(40, 70),
    heads=2,
    width=2,
    page_size=16,
    ragged=True,
    splits=3,
    dtype="bf16",
    seed=5,
    fp8=True,
    scale_block=16,
)
#: What is compiled into the kernels, for a run that should not compile all the time.
FORMS: list[dict[str, Any]] = [
    {"dtype": "bf16", "head_dim": 64, "page_size": 48, "fp8": True, "scale_block": 16},
    {"dtype": "fp16", "head_dim": 128, "latent": True, "ragged": True},
    {"dtype": "fp32", "head_dim": 32, "causal": False},
]
EDGES = st.sampled_from([0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 256, 500])
LENGTH = st.integers(1, 700) | EDGES


@st.composite
def any_form(draw: st.DrawFn) -> dict[str, Any]:
    """Whatever the kernels can be compiled with."""
    dtype = draw(st.sampled_from(["fp16", "bf16", "fp32"]))
    fp8 = dtype != "fp32" and draw(st.booleans())
    unit = 16 if fp8 else 8
    form: dict[str, Any] = {
        "dtype": dtype,
        "fp8": fp8,
        "head_dim": unit * draw(st.integers(1, 256 // unit)),
        "page_size": draw(st.sampled_from([0, 16, 32, 48, 64, 128, 256])),
        "scale_block": draw(st.sampled_from([0, 16, 32, 80, 128])) if fp8 else 0,
        "latent": draw(st.booleans()),
        "ragged": draw(st.booleans()),
        "causal": draw(st.booleans()),
    }
    if form["latent"] and dtype != "fp32" and draw(st.booleans()):
        form["head_dim"] = draw(st.sampled_from([576, 272, 512]))
        form["value_dim"] = min(form["head_dim"], draw(st.sampled_from([512, 256, 8])))
    return form


@st.composite
def steps(draw: st.DrawFn, form: dict[str, Any]) -> Case:
    kv_heads = draw(st.integers(1, 3))
    return Case(
        **form | {"ragged": bool(form.get("page_size")) or form.get("ragged", False)},
        seqlens=tuple(draw(st.lists(LENGTH, min_size=1, max_size=3))),
        heads=kv_heads * draw(st.sampled_from([1, 2, 4, 8, 40])),
        kv_heads=kv_heads,
        width=draw(st.integers(1, 8)),
        transposed=draw(st.booleans()),
        splits=draw(st.sampled_from([1, 2, 3, 5, 16, 100])),
        large=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


FORM = any_form() if SECONDS else st.sampled_from(FORMS)


@fuzzed(FORM.flatmap(lambda form: st.lists(steps(form), min_size=1, max_size=4)), examples=6)
def test_any_step_is_as_exact_as_the_framework(cases: list[Case]) -> None:
    for case in cases:
        wrong = failure(case)
        assert wrong is None, f"{wrong}\n  {case}"


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
    monkeypatch.setattr(decode_case, "decode_attention", wrong)
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
    case = Case(seqlens=(0,), fp8=True, scale_block=16)
    assert failure(case) is None
