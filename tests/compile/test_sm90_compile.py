"""The Hopper kernels keep their promises at compile time: no spill, no serialised wgmma.

A remark of the C75xx family means that ptxas could not keep the products asynchronous; the kernel
would still be right and lose a third of its speed without a word, so it fails here.
"""

from __future__ import annotations

import pytest

from kernels.compile import compile_cubin
from kernels.hopper import BACKWARD_FORMS, BackwardForm
from kernels.hopper_forms import FORWARD_FORMS, ForwardForm, forward_form
from kernels.launch import Kernel

FP16, BF16 = 0, 1
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
BACKWARD = [
    # (entry, threads, head_dim, dtype, causal)
    ("flash_backward_sm90", 384, 64, BF16, 0),
    ("flash_backward_sm90", 384, 64, BF16, 1),
    ("flash_backward_sm90", 384, 128, BF16, 0),
    ("flash_backward_sm90", 384, 128, BF16, 1),
    ("flash_backward_sm90", 384, 128, FP16, 1),
    ("flash_backward_sm90_preprocess", 128, 64, BF16, 0),
    ("flash_backward_sm90_postprocess", 256, 128, BF16, 0),
]


def backward(entry: str, head_dim: int, dtype: int, causal: int, threads: int) -> Kernel:
    macros = (
        ("DTYPE", dtype), ("HEAD_DIM", head_dim), ("BLOCK_M", 8192 // head_dim),
        ("CAUSAL", causal),
    )  # fmt: skip
    source = "flash_backward_sm90.cu" if threads == 384 else "flash_backward_sm90_rows.cu"
    return Kernel(source, entry, macros, threads)


@CAUSAL
@pytest.mark.parametrize("form", FORWARD_FORMS, ids=lambda f: f.name)
def test_forward(form: ForwardForm, causal: bool) -> None:
    # fp16 differs in one word of PTX.
    for dtype in ("bf16", "fp16") if causal else ("bf16",):
        compiled = compile_cubin(form.kernel(dtype, causal), "sm_90a")
        assert compiled.wgmma_remarks == ()
        assert compiled.spill_bytes == 0
        # What the registers of a whole block allow each thread before warpgroups trade them.
        assert compiled.registers == (168 if form.consumers == 2 else 128)


@pytest.mark.parametrize("part", ["optimistic", "repair"])
@CAUSAL
@pytest.mark.parametrize(
    "form",
    dict.fromkeys(forward_form(d, True, n) for d in (64, 128, 256) for n in (0, 8192)),
    ids=lambda f: f.name,
)
def test_the_optimistic_pair(form: ForwardForm, causal: bool, part: str) -> None:
    compiled = compile_cubin(form.kernel("bf16", causal, part), "sm_90a")
    assert compiled.wgmma_remarks == ()
    assert compiled.spill_bytes == 0


@pytest.mark.parametrize("variant", BACKWARD, ids=str)
def test_backward(variant: tuple[str, int, int, int, int]) -> None:
    entry, threads, head_dim, dtype, causal = variant
    compiled = compile_cubin(backward(entry, head_dim, dtype, causal, threads), "sm_90a")
    assert compiled.wgmma_remarks == ()
    assert compiled.spill_bytes == 0


@pytest.mark.parametrize("part", ["", "preprocess", "postprocess"])
@pytest.mark.parametrize("form", [f for f in BACKWARD_FORMS if not f.direct], ids=lambda f: f.name)
def test_the_deterministic_backward(form: BackwardForm, part: str) -> None:
    for causal in (False, True):
        kernel = form.kernel(part, "bf16", causal, deterministic=True, dlse=causal)
        compiled = compile_cubin(kernel, "sm_90a")
        assert compiled.wgmma_remarks == ()
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
