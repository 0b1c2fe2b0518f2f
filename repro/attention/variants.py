"""The ways to compute exact attention that every comparison of time, memory and error contains.

=====================  ==========================================================================
standard               S and P stored, the framework's own matmul and softmax (FA 2022, Alg. 0, 3)
standard-checkpointed  the same inside non-reentrant checkpointing: S and P die after the forward
chunked                Rabe & Staats 2021: chunks of queries, each a checkpointed sum over chunks
                       of keys, their published chunk sizes; gradients by recomputation
flash                  ours, atomic dq on a GPU
flash-deterministic    ours, dq summed in a fixed order
sdpa-…                 torch's fused back ends, forced one at a time
=====================  ==========================================================================

All take q (B, H, Nq, D) and k, v (B, Hkv, Nk, D), are causal bottom-right and expect every row to
see at least one key. Which fused back end really ran is asked of the dispatcher
(:func:`ran_backend`), not assumed: a silent fall-back to the dense path would void a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from repro.attention.operator import flash_attention

__all__ = ["VARIANTS", "chunked", "ran_backend", "standard", "unavailable"]

Variant = Callable[..., Tensor]


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _hidden(
    rows: range, columns: range, offset: int, causal: bool, key_mask: Tensor | None, device: Any
) -> Tensor | None:
    """True where a pair takes no part, broadcastable to (B, H, rows, columns), or None."""
    hidden = None
    if causal and columns.stop - 1 > rows.start + offset:
        row = torch.arange(rows.start, rows.stop, device=device)[:, None] + offset
        hidden = torch.arange(columns.start, columns.stop, device=device)[None, :] > row
    if key_mask is not None:
        away = ~key_mask[:, None, None, columns.start : columns.stop]
        hidden = away if hidden is None else hidden | away
    return hidden


def standard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Scores and weights stored in the io type; autograd keeps the (N, N) weights."""
    k, v = _grouped(q, k, v)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.mT) * scale
    offset = k.shape[2] - q.shape[2]
    hidden = _hidden(range(q.shape[2]), range(k.shape[2]), offset, causal, key_mask, q.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores, -1)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, train=True)
    return weights @ v


def standard_checkpointed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """:func:`standard` recomputed in the backward."""
    return checkpoint(partial(standard, **options), q, k, v, use_reentrant=False)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    query_chunk: int = 1024,
    key_chunk: int = 4096,
) -> Tensor:
    """Self-attention does not need O(n²) memory (Rabe & Staats 2021, Fig. 1).

    For each chunk of queries, every chunk of keys gives (Σ e^{s−m} v, Σ e^{s−m}, m); the K
    partial results are kept and combined at the end (FlashAttention keeps one running result
    instead: 2022, App. B.5). Each summary is checkpointed, so the backward recomputes it. The
    chunk sizes are those of their published code.
    """
    if dropout_p > 0.0:
        raise ValueError(f"chunked attention has no dropout, got dropout_p = {dropout_p}")
    k, v = _grouped(q, k, v)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    offset = seqlen_k - seqlen_q

    def summary(
        q_rows: Tensor, k_rows: Tensor, v_rows: Tensor, rows: range, columns: range
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = (q_rows @ k_rows.mT).float() * scale
        hidden = _hidden(rows, columns, offset, causal, key_mask, q.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        top = scores.detach().amax(-1, keepdim=True)
        # A chunk in which a row sees nothing has top = -inf; its weights are e^{-inf} = 0.
        weights = torch.exp(scores - top.clamp_min(torch.finfo(torch.float32).min))
        return (weights.to(v.dtype) @ v_rows).float(), weights.sum(-1, keepdim=True), top

    def rows_of(start: int) -> Tensor:
        rows = range(start, min(start + query_chunk, seqlen_q))
        parts = []
        for first in range(0, seqlen_k, key_chunk):
            columns = range(first, min(first + key_chunk, seqlen_k))
            if causal and columns.start > rows.stop - 1 + offset:
                break
            slices = (t[:, :, columns.start : columns.stop] for t in (k, v))
            q_rows = q[:, :, rows.start : rows.stop]
            parts.append(
                checkpoint(
                    partial(summary, rows=rows, columns=columns),
                    q_rows,
                    *slices,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        values, sums, tops = (torch.stack(part) for part in zip(*parts, strict=True))
        factor = torch.exp(tops - tops.amax(0))
        return ((values * factor).sum(0) / (sums * factor).sum(0)).to(q.dtype)

    return torch.cat([rows_of(start) for start in range(0, seqlen_q, query_chunk)], 2)


def _sdpa(
    backend: SDPBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    # torch's is_causal is aligned top-left; the two agree for square problems only.
    plain = key_mask is None and (not causal or seqlen_q == seqlen_k)
    mask = None
    if not plain:
        hidden = _hidden(range(seqlen_q), range(seqlen_k), seqlen_k - seqlen_q, causal, key_mask, q.device)
        mask = None if hidden is None else ~hidden
    with sdpa_kernel([backend]):
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=causal and plain,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def _flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = flash_attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


VARIANTS: dict[str, Variant] = {
    "standard": standard,
    "standard-checkpointed": standard_checkpointed,
    "chunked": chunked,
    "flash": _flash,
    "flash-deterministic": partial(_flash, deterministic=True),
    "sdpa-math": partial(_sdpa, SDPBackend.MATH),
    "sdpa-flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
}


class _Fused(TorchDispatchMode):
    """Remembers which fused attention operators the dispatcher was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name or func.namespace == "repro":
            self.seen.append(f"{func.namespace}::{name}")
        return func(*args, **(kwargs or {}))


def ran_backend(variant: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """The operator that really computed ``variant`` for these tensors.

    The name of the one fused operator the dispatcher saw, or "unfused" when matmul and softmax
    ran one by one.
    """
    with _Fused() as fused:  # with gradients: a back end may decline because of them
        VARIANTS[variant](q, k, v, **options)
    return fused.seen[0] if fused.seen else "unfused"


def unavailable(variant: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str | None:
    """Why ``variant`` cannot run on these tensors, in one line, or None if it can."""
    try:
        with torch.no_grad():
            VARIANTS[variant](q, k, v, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).strip().splitlines()[0]
    return None
