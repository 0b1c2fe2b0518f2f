"""The matrix products and fused kernels compile for both architectures without spills."""

from __future__ import annotations

import pytest

from kernels.compile import compile_cubin
from kernels.elementwise import all_kernels as all_elementwise
from kernels.gemm import all_kernels as all_products
from kernels.launch import Kernel


def name(kernel: Kernel) -> str:
    return f"{kernel.entry}-{dict(kernel.macros)['DTYPE']}"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kernel", [*all_products(), *all_elementwise()], ids=name)
def test_no_spills(kernel: Kernel, arch: str) -> None:
    compiled = compile_cubin(kernel, arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
