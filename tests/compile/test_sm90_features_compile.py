"""The Hopper forward with a window, a softcap and ALiBi keeps the promises of the plain one.

No spill, no serialised wgmma, each role within its registers, no descriptor in vector registers
(head dimension 256 apart), and the softmax, changed scores included, under P V. Every version of
NVRTC at hand is looked at.
"""

from __future__ import annotations

import pytest

from kernels.building.compile import compile_cubin
from kernels.hopper_forms import HEAD_DIMS, forward_form
from kernels.sass import code as sass

pytestmark = pytest.mark.skipif(sass.find_nvdisasm() is None, reason=sass.MISSING)
ALL = ("window", "softcap", "alibi")
thorough = pytest.mark.thorough
CASES = [
    pytest.param(
        head_dim,
        causal,
        features,
        id=f"d{head_dim} {causal=} {' '.join(features)}",
        marks=[] if (head_dim, causal, features) == (64, True, ALL) else [thorough],
    )
    for head_dim in HEAD_DIMS["forward"]
    for causal in (False, True)
    for features in (("window",), ("softcap",), ("alibi",), ("window", "softcap"), ALL)
]


@pytest.mark.parametrize(("head_dim", "causal", "features"), CASES)
def test_features(head_dim: int, causal: bool, features: tuple[str, ...], nvrtc: str) -> None:
    form = forward_form(head_dim, causal, 1, featured=True)
    kernel = form.kernel("bf16", causal, features=features)
    compiled = compile_cubin(kernel, "sm_90a", nvrtc)
    assert compiled.wgmma_remarks == ()
    assert compiled.spill_bytes == 0
    code = sass.disassemble(compiled.cubin, kernel.entry)
    assert all(0 < used <= had for had, used in code.registers_by_role())
    loop = sass.count(code.main_loop("HGMMA"))
    assert loop["HGMMA"] == form.head_dim // 16 + form.block_n // 16
    # As in the plain form of 256, whose descriptors are more than the uniform registers hold.
    assert loop["R2UR"] <= (24 if head_dim == 256 else 0)
    scores = form.block_n // 2  # a thread's
    special = 2 if "softcap" in features else 1  # of a score: an exponential, and tanh
    assert loop["MUFU"] == special * scores + 2
    under = sass.count(code.between_waits(1)[0])
    assert under["MUFU"] >= special * scores - 1
    assert under["FMNMX"] >= scores
    assert under["HGMMA"] == 0
