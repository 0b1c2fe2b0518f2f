"""The Hopper kernels keep their promises at compile time: no spill, no serialised wgmma.

A remark of the C75xx family means that ptxas could not keep the products asynchronous; the kernel
would still be right and lose a third of its speed without a word, so it fails here.
"""

from __future__ import annotations

import pytest

from kernels.compile import compile_cubin
from kernels.hopper import ForwardForm, forward_form
from kernels.launch import Kernel

FP16, BF16 = 0, 1
FORWARD = [
    # (head_dim, consumers, block_n, overlap, dtype, causal); fp16 differs in one word of PTX
    (64, 3, 128, 1, BF16, 0),
    (64, 3, 128, 1, BF16, 1),
    (64, 3, 128, 1, FP16, 1),
    (128, 3, 128, 0, BF16, 0),
    (128, 3, 128, 0, BF16, 1),
    (128, 2, 128, 1, BF16, 0),
    (128, 2, 128, 1, BF16, 1),
    (128, 2, 176, 1, BF16, 0),
    (128, 2, 176, 1, BF16, 1),
    (128, 2, 176, 1, FP16, 1),
]
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


def forward(
    head_dim: int, consumers: int, block_n: int, overlap: int, dtype: int, causal: int
) -> Kernel:
    macros = (
        ("DTYPE", dtype), ("HEAD_DIM", head_dim), ("BLOCK_N", block_n), ("CONSUMERS", consumers),
        ("CAUSAL", causal), ("OVERLAP", overlap), ("STAGES", 2),
    )  # fmt: skip
    threads = (consumers + 1) * 128
    return Kernel("flash_forward_sm90.cu", "flash_forward_sm90", macros, threads)


def backward(entry: str, head_dim: int, dtype: int, causal: int, threads: int) -> Kernel:
    macros = (
        ("DTYPE", dtype), ("HEAD_DIM", head_dim), ("BLOCK_M", 8192 // head_dim),
        ("CAUSAL", causal),
    )  # fmt: skip
    return Kernel("flash_backward_sm90.cu", entry, macros, threads)


@pytest.mark.parametrize("variant", FORWARD, ids=str)
def test_forward(variant: tuple[int, int, int, int, int, int]) -> None:
    compiled = compile_cubin(forward(*variant), "sm_90a")
    assert compiled.wgmma_remarks == ()
    assert compiled.spill_bytes == 0
    # What the registers of a whole block allow each thread before warpgroups trade them.
    assert compiled.registers == (168 if variant[1] == 2 else 128)


@pytest.mark.parametrize("part", ["optimistic", "repair"])
@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize(
    "form", [forward_form(64, False, 0), forward_form(128, True, 0)], ids=lambda f: f.name
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
