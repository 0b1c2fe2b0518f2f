"""FlashAttention-2's kernels from torch's CUDA library, executed: right to float64, both architectures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.shapes import AttentionShape
from repro.attention.reference import attention_reference, beyond_bound, framework_result, visible
from repro.attention.views import TORCH_TYPES
from repro.shipped import flash2, library

pytestmark = pytest.mark.skipif(library.library() is None, reason=library.MISSING)

SHAPES = [
    AttentionShape(1, 2, 128, 256, 64, dtype="fp16"),
    AttentionShape(2, 2, 100, 200, 64, kv_heads=1, dtype="bf16", causal=True),
    AttentionShape(1, 1, 256, 256, 128, dtype="bf16", causal=True),
    AttentionShape(1, 2, 70, 90, 128, dtype="fp16"),
]


def stored(x: Tensor) -> np.ndarray:
    """(B, H, N, D) as the kernels take it: (B, N, H, D), bf16 as uint16."""
    lying = x.transpose(1, 2).contiguous()
    return (lying.view(torch.uint16) if x.dtype == torch.bfloat16 else lying).numpy().copy()


def tensor(x: np.ndarray, dtype: str) -> Tensor:
    """The (B, H, N, D) values of what a kernel wrote."""
    return torch.from_numpy(x).view(TORCH_TYPES[dtype]).transpose(1, 2)


CASES = [(shape, architecture, late) for shape in SHAPES for architecture in (80, 90) for late in (False, True)]
ONE = (SHAPES[0], 90, False)
MARKED = [case if case == ONE else pytest.param(*case, marks=pytest.mark.thorough) for case in CASES]


@pytest.mark.parametrize(("shape", "architecture", "late"), MARKED)
def test_both_passes_are_right(shape: AttentionShape, architecture: int, late: bool) -> None:
    """late: copies arrive as late as they may, and warps run in a drawn order."""
    draw = torch.Generator().manual_seed(1)
    dtype = TORCH_TYPES[shape.dtype]
    sizes = {"q": (shape.heads, shape.seqlen_q), "k": (shape.kv_heads, shape.seqlen_k)}
    sizes |= {"v": sizes["k"], "dout": sizes["q"]}
    given: dict[str, Any] = {
        name: torch.randn(shape.batch, *size, shape.head_dim, generator=draw).to(dtype) for name, size in sizes.items()
    }
    arrays = flash2.arrays(shape, {name: stored(x) for name, x in given.items()})
    for kernel in flash2.KERNELS:
        flash2.launch(kernel, architecture, shape, arrays, adversarial=late)
    want = attention_reference(*given.values(), causal=shape.causal)
    seen = visible(shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k, causal=shape.causal)
    theirs = framework_result(*given.values(), seen=seen, scale=shape.head_dim**-0.5)
    results = {name: tensor(arrays[name], shape.dtype) for name in ("out", "dq", "dk", "dv")}
    for name in ("dk", "dv"):  # one of each query head
        heads = (shape.kv_heads, shape.heads // shape.kv_heads)
        results[name] = results[name].double().unflatten(1, heads).sum(2)
    results["lse"] = torch.from_numpy(arrays["lse"])
    wrong = [beyond_bound(name, result, want, theirs, dtype) for name, result in results.items()]
    assert wrong == [None] * len(wrong)
