"""Property tests: random shapes, masks, strides and types, held to float64 and to identities."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from attention_support import inputs, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import repro
from repro import fuzz
from repro.attention import cases, engine
from repro.attention.cases import BIAS_LAYOUTS, LAYOUTS, VALUES, Case

SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

NEEDED = [(True, True, True), (True, False, False), (False, True, True)]
SINKS = st.sampled_from([0, 1, 40])
LENGTH = st.one_of(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65]), st.integers(1, 100))


#: What is compiled into the kernels: a few forms, so that compiling does not take the whole time.
#: ``python -m repro.fuzz`` knows all of them.
FORMS: list[dict[str, Any]] = [
    {"dtype": "fp32", "head_dim": 32},
    {"dtype": "fp32", "head_dim": 32, "causal": True},
    {"dtype": "fp32", "head_dim": 32, "key_keep": 0.6},
    {"dtype": "fp32", "head_dim": 32, "causal": True, "key_keep": 0.6},
    {"dtype": "fp32", "head_dim": 32, "dropout_p": 0.3},
    {"dtype": "fp32", "head_dim": 32, "block_keep": 0.5, "tile": (16, 16)},
    {"dtype": "fp16", "head_dim": 64},
    {"dtype": "fp16", "head_dim": 64, "causal": True},
    {"dtype": "fp16", "head_dim": 64, "key_keep": 0.6},
    {"dtype": "bf16", "head_dim": 128},
    {"dtype": "fp32", "head_dim": 32, "softcap": 2.0},
    {"dtype": "fp32", "head_dim": 32, "alibi": "items", "causal": True, "deterministic": True},
    {"dtype": "fp32", "head_dim": 32, "bias": (0, 1), "bias_gradient": True},
    {"dtype": "fp16", "head_dim": 64, "bias": (1, 1), "bias_gradient": True, "causal": True},
    {
        "dtype": "fp32",
        "head_dim": 32,
        "bias": (0, 0),
        "bias_gradient": True,
        "causal": True,
        "deterministic": True,
    },
    {"dtype": "fp16", "head_dim": 64, "softcap": 20.0, "alibi": "heads", "key_keep": 0.6},
    {"dtype": "fp32", "head_dim": 32, "window": ()},
    {"dtype": "fp16", "head_dim": 64, "causal": True, "window": ()},
]


@st.composite
def problems(draw: st.DrawFn) -> Case:
    form = draw(st.sampled_from(FORMS))
    most = form["head_dim"]
    kv_heads = draw(st.integers(1, 2))
    if "window" in form:
        side = st.none() | st.integers(0, 100)
        form = form | {"window": draw(st.tuples(side, side)), "sinks": draw(SINKS)}
    return Case(
        **form | {"head_dim": draw(st.integers(most // 8 + 1, most // 4).map(lambda x: 4 * x))},
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        seqlen_q=draw(LENGTH),
        seqlen_k=draw(LENGTH),
        scale=draw(st.sampled_from([None, 0.5])),
        layout=draw(st.sampled_from(LAYOUTS)),
        dout_layout=draw(st.sampled_from(LAYOUTS)),
        bias_layout=draw(st.sampled_from(BIAS_LAYOUTS)) if "bias" in form else "plain",
        values=draw(st.sampled_from(VALUES)),
        needed=draw(st.sampled_from(NEEDED)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


@SETTINGS
@given(problems())
def test_any_problem_is_as_exact_as_the_framework(case: Case) -> None:
    wrong = cases.failure(case)
    assert wrong is None, f"{wrong}\n  {fuzz.command(case, 'cpu')}"


@settings(SETTINGS, max_examples=10)
@given(st.integers(1, 90), st.integers(0, 2**31 - 1))
def test_keys_may_be_permuted(seqlen: int, seed: int) -> None:
    """Softmax does not know the order of the keys: out stays, dk and dv move with them."""
    q, k, v, dout = inputs(1, 2, 33, seqlen, 16, seed=seed)
    order = torch.randperm(seqlen, generator=torch.Generator().manual_seed(seed))
    first = run(q, k, v, dout)
    second = run(q, k[:, :, order], v[:, :, order], dout)
    close = {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(second.out, first.out, **close)
    torch.testing.assert_close(second.lse, first.lse, **close)
    torch.testing.assert_close(second.dk, first.dk[:, :, order], **close)
    torch.testing.assert_close(second.dv, first.dv[:, :, order], **close)


@settings(SETTINGS, max_examples=10)
@given(st.integers(2, 90), st.data())
def test_two_halves_combine_by_their_row_sums(seqlen: int, data: st.DataObject) -> None:
    """(out, lse) of two sets of keys give those of the union: what lse is returned for."""
    cut = data.draw(st.integers(1, seqlen - 1))
    q, k, v, _ = inputs(1, 2, 33, seqlen, 16, seed=seqlen)
    whole, whole_lse = repro.flash_attention(q, k, v, return_lse=True)
    parts = [
        repro.flash_attention(q, k[:, :, span], v[:, :, span], return_lse=True)
        for span in (slice(0, cut), slice(cut, None))
    ]
    lse = torch.logsumexp(torch.stack([stats for _, stats in parts]), 0)
    out = sum(torch.exp(stats - lse)[..., None] * rows for rows, stats in parts)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=2e-6)


@settings(SETTINGS, max_examples=10)
@given(st.integers(1, 80), st.booleans())
def test_gradients_are_orthogonal_to_what_changes_nothing(seqlen: int, causal: bool) -> None:
    """Adding one vector to every key shifts all scores of a row alike, so Σ_j dk_j = 0."""
    q, k, v, dout = inputs(1, 1, seqlen, seqlen, 16, seed=seqlen)
    dk = run(q, k, v, dout, causal=causal).dk
    assert float(dk.double().sum(2).abs().max()) <= 1e-5 * max(1.0, float(dk.abs().sum(2).max()))


def test_cases_survive_their_spelling() -> None:
    for seed in range(50):
        case = cases.draw(seed, form=seed)
        assert Case.from_json(case.to_json()) == case
    with pytest.raises(TypeError, match="colour"):
        Case.from_json(json.dumps({"colour": 1}))


def test_hopper_kernels_are_drawn_for_packed_sequences_too() -> None:
    """Of both head dimensions that they have, and with nothing that sends them to sm_80's."""
    found = [
        case for seed in range(600)
        for case in (cases.draw(seed, form=seed),) if case.card and case.queries
    ]  # fmt: skip
    assert {(case.head_dim, case.causal) for case in found} >= {
        (head_dim, causal) for head_dim in (64, 128) for causal in (False, True)
    }
    for case in found:
        assert (case.window, case.softcap, case.alibi, case.tile) == (None, None, "", None)
        assert not case.dropout_p


def test_the_fuzzer_finds_and_shrinks_a_fault(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a fault planted (the last key is forgotten beyond 20 keys) it reports a small case."""
    real = engine.forward

    def forgetful(q: Any, k: Any, v: Any, out: Any, lse: Any, options: Any) -> None:
        plain = options.key_mask is None and options.block_mask is None and not options.causal
        if plain and k.shape[2] > 20:
            k, v = k[:, :, :-1], v[:, :, :-1]
        real(q, k, v, out, lse, options)

    engine.forget()
    monkeypatch.setattr(engine, "forward", forgetful)
    assert fuzz.main(["--case", '{"seqlen_q": 3, "seqlen_k": 21}']) == 1
    assert fuzz.main(["--case", '{"seqlen_q": 3, "seqlen_k": 20}']) == 0
    start = Case(batch=2, seqlen_q=40, seqlen_k=50, head_dim=16, layout="bnhd")
    small = fuzz.shrink(start, "cpu", float("inf"))
    assert small.seqlen_k == 21
    assert (small.batch, small.seqlen_q, small.layout) == (1, 1, "bhnd")
    assert fuzz.complaint(small, "cpu")
    assert "FAILED" in capfd.readouterr().err
