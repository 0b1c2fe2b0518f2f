"""Every option by itself, beside the others, and where nothing is seen: results and bytes.

``failure`` holds results to float64 within twice the framework's own error, bytes to ``predict``,
and packed sequences to the bits of separate calls; on the host, on the host with the kernels of a
Hopper card, and on a GPU where there is one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_case import Case, call_of, failure
from features import FEATURES, FORWARD, PACKED, SIXTEEN_BITS, case_of, together

from kernels import dispatch
from repro.attention import launcher

FORMS: dict[str, dict[str, Any]] = {
    "fp32 d20": {"dtype": "fp32", "head_dim": 20, "deterministic": True},
    "fp16 d256": {"dtype": "fp16", "head_dim": 256},
    "bf16 d128 causal": {"dtype": "bf16", "head_dim": 128, "causal": True},
}


@pytest.fixture(autouse=True)
def with_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launcher.CHECKS_VARIABLE, "1")


def hold(case: Case, device: str = "cpu") -> None:
    wrong = failure(case, device)
    assert wrong is None, f"{wrong}\n  {case}"


#: Every option in fp32, where it has that, and in one of the two 16-bit forms.
IN_TURNS = [
    (feature, form)
    for number, feature in enumerate(FEATURES)
    for form in ("fp32 d20", ("fp16 d256", "bf16 d128 causal")[number % 2])
    if not (feature in SIXTEEN_BITS and form == "fp32 d20")
]


@pytest.mark.parametrize(("feature", "form"), IN_TURNS)
def test_types_and_widths(feature: str, form: str, device: str) -> None:
    hold(case_of(feature, **FORMS[form]), device)


@pytest.mark.parametrize("deterministic", [False, True])
def test_beside_every_other_option(deterministic: bool, device: str) -> None:
    hold(together(deterministic=deterministic), device)


def test_fp8_beside_every_other_option(device: str) -> None:
    changes = {"fp8": True, "scale_block": 48, "bias_gradient": False, **FORWARD}
    hold(together(head_dim=48, **changes), device)
    hold(together(head_dim=48, order="sawtooth", **changes), device)


@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_beside_every_other_option(deterministic: bool, device: str) -> None:
    alone = {"key_keep": 0.0, "block_keep": 0.0, "bias": None, "bias_gradient": False, "sink_logits": False}
    hold(together(**{**alone, **PACKED, "deterministic": deterministic}), device)


NOTHING: dict[str, dict[str, Any]] = {
    "no key in the window": {"window": (3, 9), "seqlen_q": 200},
    "more queries than keys under a causal mask": {"causal": True, "seqlen_q": 130},
    "no key in the mask": {"key_keep": 1e-9},
    "no block in the mask": {"block_keep": 1e-9, "tile": (32, 32)},
    "a bias, and more queries than keys": {"causal": True, "seqlen_q": 130, "bias": (1, 1), "bias_gradient": True},
    "no key in the window, and sinks": {"window": (3, 9), "seqlen_q": 200, "sink_logits": True},
    "sequences without keys": {"batch": 1, "queries": (9, 5), "keys": (0, 7)},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("what", NOTHING)
def test_nothing_seen(what: str, deterministic: bool) -> None:
    """Rows that see no key are 0, and -inf in lse; they take and send no gradient."""
    form = {"dtype": "fp32", "head_dim": 20, "deterministic": deterministic}
    case = case_of("plain", **{**form, **NOTHING[what]})
    hold(case)
    call = call_of(case)
    leaves = call.leaves()
    out, lse = call(*leaves, return_lse=True)
    nothing = lse.isneginf()
    if case.sink_logits:  # of such a row lse is the logit
        nothing = lse == call.changes["sink_logits"][:, None]
    assert bool(nothing.any())
    assert not bool(out[nothing].any())
    dq = torch.autograd.grad(out, leaves[:1], call.dout)[0]
    assert not bool(dq[nothing].any())


HOPPER: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (60, 9), "sinks": 5},
    "softcap": {"softcap": 2.0},
    "ALiBi": {"alibi": "items"},
    "all": {"window": (100, 0), "sinks": 2, "softcap": 2.0, "alibi": "heads"},
    "packed": {"batch": 1, "queries": (33, 0, 1, 140, 16, 0), "keys": (50, 20, 1, 200, 0, 0)},
    "shared out": {"dropout_p": 0.2},  # sm_80's kernels, on this card too
}
HOPPER_FORMS: dict[str, dict[str, Any]] = {
    "fp16 d128": {"dtype": "fp16", "head_dim": 128},
    "bf16 d64 causal, in turns": {"dtype": "bf16", "head_dim": 64, "causal": True, "deterministic": True},
}


@pytest.mark.parametrize("form", HOPPER_FORMS)
@pytest.mark.parametrize("feature", HOPPER)
def test_kernels_of_a_hopper_card(feature: str, form: str) -> None:
    sizes = {"heads": 2, "kv_heads": 1, "seqlen_q": 200, "seqlen_k": 300}
    changes = {**sizes, **HOPPER[feature], **HOPPER_FORMS[form]}
    hold(Case(card=dispatch.HOPPER, layout="bnhd", dout_layout="bnhd", **changes))
