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
#: Options of the operator, on 20 rows of head dimension 128.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (7, 2), "sinks": 3},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "packed": {"cu_seqlens_q": TABLE, "cu_seqlens_k": TABLE},
}
EVERY_FORM = pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)


@pytest.fixture(autouse=True)
def _on_hopper() -> Iterator[None]:
    with host_as(dispatch.HOPPER):
        yield
        launched = backend_of(torch.device("cpu")).traffic  # type: ignore[attr-defined]
        assert {"flash_backward_sm90"} <= set(launched)
        assert not {"flash_forward", "flash_backward"} & set(launched)
        backend_of(torch.device("cpu")).reset()  # type: ignore[attr-defined]


def operands() -> tuple[list[Tensor], Tensor]:
    *given, dout = (x.to(torch.bfloat16) for x in inputs(1, 2, 20, 20, 128))
    return [x.requires_grad_() for x in given], dout


def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    out = repro.flash_attention(q, k, v, causal=True, deterministic=True, **options)
    assert isinstance(out, Tensor)
    return out


def arguments(options: dict[str, Any]) -> Options:
    left, right = options.get("window", (None, None))
    given = {name: value for name, value in options.items() if name != "window"}
    return Options(causal=True, scale=0.25, deterministic=True, left=left, right=right, **given)


@EVERY_FORM
def test_opcheck(options: dict[str, Any]) -> None:
    """Both operators: schema, fake results, registered gradients, tracing."""
    leaves, dout = operands()
    given = arguments(options)
    torch.library.opcheck(torch.ops.repro.flash_attention, (*leaves, *given))
    q, k, v = (x.detach() for x in leaves)
    out, lse = torch.ops.repro.flash_attention(q, k, v, *given)
    torch.library.opcheck(
        torch.ops.repro.flash_attention_backward, (dout, None, q, k, v, out, lse, *given, [True, True, True, False])
    )


@EVERY_FORM
def test_compiled_and_run_again_give_the_same_bits(options: dict[str, Any]) -> None:
    leaves, dout = operands()
    plain = torch.autograd.grad(attend(*leaves, options), leaves, dout)
    again = checkpoint(attend, *leaves, options, use_reentrant=False)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for out in (again, compiled(*leaves, options)):
        for got, want in zip(torch.autograd.grad(out, leaves, dout), plain, strict=True):
            assert torch.equal(got, want)
