"""The matrix products and fused kernels compile for both architectures without spills."""

from __future__ import annotations

import pytest

from kernels.beside.elementwise import all_kernels as all_elementwise
from kernels.beside.gemm import all_kernels as all_products
from kernels.building.compile import compile_cubin
from kernels.launch import Kernel


def name(case: Kernel | str) -> str:
    if isinstance(case, str):
        return case
    return f"{case.entry}-{dict(case.macros)['DTYPE']}"


CASES = [(kernel, arch) for kernel in all_products() for arch in ("sm_80", "sm_90")]
CASES += [(kernel, "sm_80") for kernel in all_elementwise()]


@pytest.mark.parametrize(("kernel", "arch"), CASES, ids=lambda x: x if isinstance(x, str) else name(x))
def test_no_spills(kernel: Kernel, arch: str) -> None:
    compiled = compile_cubin(kernel, arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
