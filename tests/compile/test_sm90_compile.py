"""The Hopper kernels keep their promises at compile time: no spill, no serialised wgmma.

A remark of the C75xx family means that ptxas could not keep the products asynchronous; the kernel
would still be right and lose a third of its speed without a word, so it fails here.
"""

from __future__ import annotations

import pytest

from kernels.building.compile import compile_cubin
from kernels.hopper import BACKWARD_FORMS, BackwardForm
from kernels.hopper_forms import FORWARD_FORMS, PACKED_FORMS, ForwardForm, forward_form
from kernels.launch import Kernel

THOROUGH = pytest.mark.thorough
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
#: Those whose machine code ``test_sm90_sass.py`` reads are dense; of the rest the audit has the spills.
DENSE = pytest.mark.parametrize("causal", [False, pytest.param(True, marks=THOROUGH)], ids=["dense", "causal"])
#: fp16 differs in one word of PTX.
DTYPE = pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=THOROUGH)])


@DTYPE
@DENSE
@pytest.mark.parametrize("form", [*FORWARD_FORMS, *PACKED_FORMS], ids=lambda f: f.name)
def test_forward(form: ForwardForm, causal: bool, dtype: str, nvrtc: str) -> None:
    compiled = compile_cubin(form.kernel(dtype, causal), "sm_90a", nvrtc)
    assert compiled.wgmma_remarks == ()
    assert compiled.spill_bytes == 0
    # What the registers of a whole block allow each thread before warpgroups trade them.
    assert compiled.registers == (168 if form.consumers == 2 else 128)


@pytest.mark.parametrize("part", ["optimistic", "repair"])
@pytest.mark.parametrize("causal", [pytest.param(False, marks=THOROUGH), True], ids=["dense", "causal"])
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=() if (form.head_dim, form.persistent) == (128, True) else THOROUGH)
        for form in dict.fromkeys(forward_form(d, True, n) for d in (64, 128, 256) for n in (0, 8192))
    ],
    ids=lambda f: f.name,
)
def test_the_optimistic_pair(form: ForwardForm, causal: bool, part: str, nvrtc: str) -> None:
    compiled = compile_cubin(form.kernel("bf16", causal, part), "sm_90a", nvrtc)
    assert compiled.wgmma_remarks == ()
    assert compiled.spill_bytes == 0


@DTYPE
@DENSE
@pytest.mark.parametrize("form", BACKWARD_FORMS, ids=lambda f: f.name)
def test_backward(form: BackwardForm, causal: bool, dtype: str, nvrtc: str) -> None:
    for deterministic in (False, True)[: 1 if form.dq_from_registers else 2]:
        kernel = form.kernel("", dtype, causal, deterministic=deterministic)
        compiled = compile_cubin(kernel, "sm_90a", nvrtc)
        assert compiled.wgmma_remarks == ()
        assert compiled.spill_bytes <= form.spill_bytes(causal)
        assert compiled.registers == 168


@THOROUGH
@CAUSAL
@pytest.mark.parametrize("feature", ["window", "softcap", "alibi", "all"])
@pytest.mark.parametrize("form", [f for f in BACKWARD_FORMS if f.block_m != 80], ids=lambda f: f.name)
def test_features_of_the_backward_spill_nothing(form: BackwardForm, feature: str, causal: bool, nvrtc: str) -> None:
    asked = ("window", "softcap", "alibi") if feature == "all" else (feature,)
    if not form.takes("bf16", asked):
        asked = ("window", "alibi")  # all that a head dimension of 64 has room for together
    for options, more in (({}, ()), ({"deterministic": True}, ()), ({}, ("sawtooth",))):
        if (options or more) and form.dq_from_registers:
            continue
        kernel = form.kernel("", "bf16", causal, features=(*asked, *more), **options)
        compiled = compile_cubin(kernel, "sm_90a", nvrtc)
        assert compiled.wgmma_remarks == ()
        assert compiled.spill_bytes == 0
        assert compiled.registers == 168


@THOROUGH
@CAUSAL
@pytest.mark.parametrize("form", [BackwardForm(64, 128), BackwardForm(128, 64)], ids=lambda f: f.name)
def test_packed_sequences_of_the_backward_spill_nothing(form: BackwardForm, causal: bool, nvrtc: str) -> None:
    for dtype in ("bf16", "fp16"):
        for deterministic in (False, True):
            for part in ("", "preprocess", "postprocess"):
                kernel = form.kernel(part, dtype, causal, deterministic=deterministic, features=["packed"])
                compiled = compile_cubin(kernel, "sm_90a", nvrtc)
                assert compiled.wgmma_remarks == ()
                assert compiled.spill_bytes == 0
                assert part or compiled.registers == 168


@pytest.mark.parametrize("part", ["preprocess", "postprocess"])
@pytest.mark.parametrize("form", [BackwardForm(64, 128), BackwardForm(128, 64)], ids=lambda f: f.name)
def test_what_surrounds_the_backward(form: BackwardForm, part: str, nvrtc: str) -> None:
    for deterministic in (False, True):
        kernel = form.kernel(part, "bf16", False, deterministic=deterministic, dlse=deterministic)
        compiled = compile_cubin(kernel, "sm_90a", nvrtc)
        assert compiled.spill_bytes == 0


def test_a_serialised_pipeline_is_noticed() -> None:
    """A product whose result is used without waiting makes ptxas insert the wait itself."""
    source = """
#define DTYPE 1
#include "device_sm90.cuh"
extern "C" __global__ void __launch_bounds__(128) hasty(float* out, uint64 a, uint64 b) {
    float d[32];
    wgmma_fence();
    Wgmma<64>::ss_first<0, 0>(d, a, b);
    wgmma_commit();
    float sum = 0.0f;
    for (int i = 0; i < 32; ++i) sum += d[i];
    out[threadIdx.x] = sum;
}
"""
    compiled = compile_cubin(Kernel(source, "hasty", (), 128), "sm_90a")
    assert any("C7517" in remark for remark in compiled.wgmma_remarks)
