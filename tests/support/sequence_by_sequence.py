"""What packed sequences must give: each sequence by itself, one after another.

:func:`by_sequence` does that with any implementation of plain attention, the float64 reference
first of all; :func:`separate_calls` with the operator itself, to whose bits a packed call is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from analysis.packed import Lengths
from repro.attention.operator import flash_attention
from repro.attention.packed import each_sequence
from repro.attention.reference import Reference


def by_sequence(
    of_one: Callable[..., Reference],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lengths: Lengths,
    /,
    *,
    keep: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> Reference:
    """Results of each sequence, joined as the packed call has them.

    Args:
        of_one: called with q, k, v, dout of one sequence, (1, H, n, D), and its options.
        q, k, v, dout: (1, H, total, D).
        keep: (sequences, H, longest, longest), the dropout mask of a batch of them.
        alibi_slopes: (H,) or (sequences, H).
    """
    parts = []
    for at, queries, keys in each_sequence(lengths):
        own: dict[str, Any] = dict(options)
        if keep is not None:
            rows, columns = lengths.queries[at], lengths.keys[at]
            own["keep"] = keep[at : at + 1, :, :rows, :columns]
        if alibi_slopes is not None:
            shared = alibi_slopes.dim() == 1
            own["alibi_slopes"] = alibi_slopes if shared else alibi_slopes[at : at + 1]
        parts.append(of_one(q[:, :, queries], k[:, :, keys], v[:, :, keys], dout[:, :, queries], **own))
    return _joined(parts)


def _joined(parts: Sequence[Reference]) -> Reference:
    joined: dict[str, Any] = {"score": max(part.score for part in parts)}
    for field in fields(Reference):
        values = [getattr(part, field.name) for part in parts]
        if isinstance(values[0], Tensor):
            joined[field.name] = torch.cat(values, 2)
        elif field.name == "terms" and values[0] is not None:
            joined["terms"] = {n: torch.cat([v[n] for v in values], 2) for n in values[0]}
    return Reference(**joined)


def separate_calls(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: Lengths, /, **options: Any) -> Reference:
    """out, lse, dq, dk and dv of a call of ``repro.flash_attention`` for each sequence."""

    def of_one(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Reference:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = flash_attention(*leaves, return_lse=True, **options)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        return Reference(out.detach(), lse, dq, dk, dv)

    return by_sequence(of_one, q, k, v, dout, lengths, **options)
