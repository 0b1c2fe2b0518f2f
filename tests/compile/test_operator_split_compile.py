"""The split backward's kernels compile for both architectures without spills."""

from __future__ import annotations

import pytest

from kernels.attention import configure
from kernels.building.compile import compile_cubin

FORMS = [
    ("backward-dq", "fp16", 64, {"causal": True}),
    ("backward-dq", "bf16", 128, {"causal": True, "key_mask": True, "dropout": True}),
    ("backward-dq", "fp16", 256, {"key_mask": True, "dropout": True}),
    ("backward-dq", "fp32", 128, {"causal": True, "key_mask": True, "dropout": True}),
    ("backward", "bf16", 128, {"causal": True, "query_gradient": False}),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("pass_", "dtype", "head_dim", "options"), FORMS)
def test_no_spills(pass_: str, dtype: str, head_dim: int, options: dict, arch: str) -> None:
    kernel = configure(pass_, dtype, head_dim, **options).kernel()
    compiled = compile_cubin(kernel, arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
    assert compiled.registers * kernel.threads <= 65536
