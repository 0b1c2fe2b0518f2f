"""The probes compile for both architectures without spills."""

from __future__ import annotations

import pytest

from kernels.beside.probes import all_probes
from kernels.building.compile import compile_cubin
from kernels.launch import Kernel


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kernel", all_probes(), ids=lambda kernel: kernel.entry)
def test_no_spills(kernel: Kernel, arch: str) -> None:
    compiled = compile_cubin(kernel, arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
