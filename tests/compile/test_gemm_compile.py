"""The matrix products and fused kernels compile for both architectures without spills."""

from __future__ import annotations

import pytest

from kernels.compile import compile_cubin
from kernels.gemm import all_kernels
from kernels.launch import Kernel


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "kernel", all_kernels(), ids=lambda k: f"{k.entry}-{dict(k.macros)['DTYPE']}"
)
def test_no_spills(kernel: Kernel, arch: str) -> None:
    compiled = compile_cubin(kernel, arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
