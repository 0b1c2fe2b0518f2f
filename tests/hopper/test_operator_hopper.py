"""The operator as torch sees it, with the kernels that a Hopper card would get: opcheck, compiling,
checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_support import inputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import repro
from kernels import dispatch
from repro.attention.launcher import backend_of, host_as
from repro.attention.options import Options

TABLE = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
#: Options of the operator as registered, on 20 rows of head dimension 128.
FORMS: dict[str, dict[str, Any]] = {
    "window, softcap, ALiBi": {"window": (7, 2), "sinks": 3, "softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25])},
    "packed": {"cu_seqlens_q": TABLE, "cu_seqlens_k": TABLE},
}


@pytest.fixture(autouse=True)
def _on_hopper() -> Iterator[None]:
    with host_as(dispatch.HOPPER):
        backend: Any = backend_of(torch.device("cpu"))
        backend.reset()
        yield
        launched = set(backend.traffic)
        assert {"flash_backward_sm90"} <= launched
        assert not {"flash_forward", "flash_backward"} & launched


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_checked_compiled_and_run_again(options: dict[str, Any]) -> None:
    """Schema, fake results, registered gradients and tracing of both operators; the bits of a compiled
    call and of a recomputed one."""
    *operands, dout = (x.bfloat16() for x in inputs(1, 2, 20, 20, 128))
    leaves = [x.requires_grad_() for x in operands]
    left, right = options.get("window", (None, None))
    rest = {name: value for name, value in options.items() if name != "window"}
    given = Options(causal=True, scale=0.25, deterministic=True, left=left, right=right, **rest)
    torch.library.opcheck(torch.ops.repro.flash_attention, (*leaves, *given))
    q, k, v = (x.detach() for x in leaves)
    out, lse = torch.ops.repro.flash_attention(q, k, v, *given)
    needed = [True, True, True, False]
    torch.library.opcheck(torch.ops.repro.flash_attention_backward, (dout, None, q, k, v, out, lse, *given, needed))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return repro.flash_attention(q, k, v, causal=True, deterministic=True, **options)

    plain = torch.autograd.grad(attend(*leaves), leaves, dout)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for again in (checkpoint(attend, *leaves, use_reentrant=False), compiled(*leaves)):
        for got, want in zip(torch.autograd.grad(again, leaves, dout), plain, strict=True):
            assert torch.equal(got, want)
