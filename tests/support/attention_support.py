"""What the operator's tests share: inputs, the bounds, and running one case with its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import repro
from repro.attention.reference import attention_reference, max_error

#: (bound of out and lse, bound of the gradients) for inputs drawn from N(0, 1), N <= 512,
#: D <= 128: about twice what fp32 accumulation with P and dS rounded to the input type gives.
BOUNDS = {torch.float32: (1e-5, 2e-5), torch.float16: (3e-3, 5e-3), torch.bfloat16: (2e-2, 4e-2)}


#: Options that the reference takes too.
REFERENCE_OPTIONS = frozenset(
    ("causal", "window", "sinks", "key_mask", "block_mask", "scale", "softcap", "alibi_slopes")
)


class Result(NamedTuple):
    """Detached results of one call."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0):
    """Reproducible N(0, 1) numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def inputs(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout."""
    kv_heads = heads if kv_heads is None else kv_heads
    make = lambda index, h, n: normal(  # noqa: E731
        batch, h, n, head_dim, dtype=dtype, device=device, seed=4 * seed + index
    )
    return (
        make(0, heads, seqlen_q),
        make(1, kv_heads, seqlen_k),
        make(2, kv_heads, seqlen_k),
        make(3, heads, seqlen_q),
    )


def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Result:
    """Forward and backward of :func:`repro.flash_attention`."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = repro.flash_attention(*leaves, return_lse=True, **options)
    grads = torch.autograd.grad(out, leaves, dout)
    return Result(out.detach(), lse.detach(), *grads)


def check(result: Result, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> None:
    """Hold a result to the float64 reference."""
    expected = attention_reference(q, k, v, dout, **options)
    bound, gradient_bound = BOUNDS[q.dtype]
    for name in Result._fields:
        error = max_error(getattr(result, name), getattr(expected, name))
        limit = gradient_bound if name.startswith("d") else bound
        assert error <= limit, f"{name}: error {error:.3g} above {limit:.3g} ({options})"


def run_and_check(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Result:
    """:func:`run` and :func:`check` with the same masks and scale."""
    result = run(q, k, v, dout, **options)
    known = {name: value for name, value in options.items() if name in REFERENCE_OPTIONS}
    if "block_mask" in options:
        known["block"] = options["tile"]
    check(result, q, k, v, dout, **known)
    return result
