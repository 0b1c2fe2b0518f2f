"""Every option of attention as compiled machine code, on the problems of the conformance suite.

``failure`` holds results to float64 and packed sequences to the bits of separate calls, and bytes to
``predict``: the kernels' machine code moves what the sums say, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from attention_case import Case, failure
from features import FEATURES, FORWARD, PACKED, SIXTEEN_BITS, case_of, together

from kernels import dispatch
from kernels.launch import Kernel
from kernels.machine.backend import MachineBackend
from repro.attention import engine, launcher

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")


class Looking(MachineBackend):
    """Counts one look of each wait for a turn: how often a block looks depends on the others."""

    def launch(self, kernel: Kernel, *args: Any, **options: Any) -> None:
        super().launch(kernel, *args, **options)
        counted = self.traffic[kernel.entry]
        if ("turns", "read") in counted:
            assert counted["turns", "read"] >= counted["turns", "write"]
            counted["turns", "read"] = counted["turns", "write"]


@cache
def backend(architecture: str) -> MachineBackend:
    """One for all tests, which share compiled kernels."""
    found = Looking(architecture)
    if architecture == "sm_90a":
        found.compute_capability = dispatch.HOPPER
    return found


@pytest.fixture(autouse=True)
def as_machine_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors run compiled kernels: those of an A100, and a Hopper card's where a case asks."""
    engine.forget()
    monkeypatch.setattr(launcher, "_host", lambda checks: backend("sm_80"))
    monkeypatch.setattr(launcher, "_host_as", lambda checks, card: backend("sm_90a"))
    yield
    engine.forget()


FORMS: dict[str, dict[str, Any]] = {
    "bf16 d64 causal": {"dtype": "bf16", "head_dim": 64, "causal": True},
    "fp16 d256": {"dtype": "fp16", "head_dim": 256},
    "fp32 d20": {"dtype": "fp32", "head_dim": 20, "deterministic": True},
}


def each_feature() -> Iterator[Any]:
    for form in FORMS:
        for feature in FEATURES:
            if feature in SIXTEEN_BITS and FORMS[form]["dtype"] == "fp32":
                continue
            usual = form == "bf16 d64 causal" and feature == "plain"
            yield pytest.param(feature, form, marks=() if usual else pytest.mark.thorough)


@pytest.mark.parametrize(("feature", "form"), list(each_feature()))
def test_options_of_the_sm80_kernels(feature: str, form: str) -> None:
    assert failure(case_of(feature, **FORMS[form])) is None


@pytest.mark.thorough
@pytest.mark.parametrize("deterministic", [False, True])
def test_beside_every_other_option(deterministic: bool) -> None:
    assert failure(together(deterministic=deterministic)) is None


@pytest.mark.thorough
def test_fp8_beside_every_other_option() -> None:
    changes = {"fp8": True, "scale_block": 48, "bias_gradient": False, "order": "sawtooth", **FORWARD}
    assert failure(together(head_dim=48, **changes)) is None


@pytest.mark.thorough
def test_packed_beside_every_other_option() -> None:
    alone = {"key_keep": 0.0, "block_keep": 0.0, "bias": None, "bias_gradient": False, "sink_logits": False}
    assert failure(together(**{**alone, **PACKED})) is None


HOPPER: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (60, 9), "sinks": 5},
    "softcap": {"softcap": 2.0},
    "ALiBi": {"alibi": "items"},
    "all": {"window": (100, 0), "sinks": 2, "softcap": 2.0, "alibi": "heads"},
    "packed": {"batch": 1, "queries": (33, 0, 1, 140, 16, 0), "keys": (50, 20, 1, 200, 0, 0)},
}
HOPPER_FORMS: dict[str, dict[str, Any]] = {
    "fp16 d128": {"dtype": "fp16", "head_dim": 128},
    "bf16 d64 causal, in turns": {"dtype": "bf16", "head_dim": 64, "causal": True, "deterministic": True},
}


@pytest.mark.thorough
@pytest.mark.parametrize("form", HOPPER_FORMS)
@pytest.mark.parametrize("feature", HOPPER)
def test_options_of_the_hopper_kernels(feature: str, form: str) -> None:
    sizes = {"heads": 2, "kv_heads": 1, "seqlen_q": 200, "seqlen_k": 300}
    changes = {**sizes, **HOPPER[feature], **HOPPER_FORMS[form]}
    assert failure(Case(card=dispatch.HOPPER, layout="bnhd", dout_layout="bnhd", **changes)) is None
