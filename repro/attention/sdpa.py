"""``repro.scaled_dot_product_attention``: the operator as torch names and means it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from analysis.arguments import flag
from repro.attention.operator import flash_attention

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, computed by :func:`flash_attention`.

    Args:
        query: (..., H, L, E).
        key: (..., Hkv, S, E).
        value: (..., Hkv, S, Ev); Ev other than E is padded by a copy, as E is.
        attn_mask: booleans (True = takes part) or numbers that are added to the scores,
            broadcastable to (..., H, L, S). Booleans that are the same for all heads and queries
            become the kernels' key mask; all else is read as a bias, an element a pair.
        dropout_p: probability; as in torch it applies whatever the mode of a module.
        is_causal: query i sees key j when ``j <= i``, aligned at the **first** row and column, as
            torch has it (``flash_attention(causal=True)`` aligns the last ones).
        scale: default 1/sqrt(E).
        enable_gqa: whether key and value may have fewer heads than query.
        softcap: as in :func:`flash_attention`; torch has none.

    Returns:
        (..., H, L, Ev). A row that sees no key is 0.

    Raises:
        TypeError, ValueError: as :func:`flash_attention`; also for ``attn_mask`` together with
        ``is_causal``, and for heads that differ without ``enable_gqa``.
    """
    if attn_mask is not None and flag("is_causal", is_causal):
        raise ValueError("attn_mask and is_causal=True exclude each other: put both into the mask")
    _check(query, key, value, enable_gqa)
    shape = query.shape
    scale = 1 / math.sqrt(shape[-1]) if scale is None else scale
    width = max(shape[-1], value.shape[-1])
    q, k, v = (_four(_widened(tensor, width)) for tensor in (query, key, value))
    masks = {} if attn_mask is None else _mask(attn_mask, query, key.shape[-2])
    keys = k.shape[2]
    rows = q.shape[2]
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, "softcap": softcap, **masks}
    out: Any
    if not is_causal:
        out = flash_attention(q, k, v, **options)
    else:
        # Keys after the last query are never seen; queries after the last key see all keys.
        out = flash_attention(q[:, :, :keys], k[:, :, :rows], v[:, :, :rows], causal=True, **options)
        if rows > keys:
            rest: Any = flash_attention(q[:, :, keys:], k, v, **options)
            out = torch.cat([out, rest], dim=2)
    result: Tensor = out[..., : value.shape[-1]].reshape(*shape[:-1], value.shape[-1])
    return result


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_nested:
            raise TypeError(f"{name} is a nested tensor; kernels take dense (strided) tensors")
        if tensor.dim() < 2 or tensor.dim() != query.dim():
            raise ValueError(
                f"query and {name} must have the same number of dimensions, two or more, got "
                f"{query.dim()} and {tensor.dim()}"
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value differ but in width: {tuple(key.shape)} and {tuple(value.shape)}")
    if not flag("enable_gqa", enable_gqa) and query.shape[:-2] != key.shape[:-2]:
        raise ValueError(
            f"query and key differ in batch or heads: {tuple(query.shape[:-2])} and "
            f"{tuple(key.shape[:-2])}; enable_gqa=True lets key have fewer heads"
        )
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"query and key differ in batch: {tuple(query.shape[:-3])} and {tuple(key.shape[:-3])}")


def _widened(tensor: Tensor, width: int) -> Tensor:
    """With zeros behind the last column: they change no score, and no column of the result."""
    missing = width - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _four(tensor: Tensor) -> Tensor:
    """As (B, H, N, D)."""
    if tensor.dim() == 4:
        return tensor
    heads = tensor.shape[-3] if tensor.dim() > 2 else 1
    return tensor.reshape(math.prod(tensor.shape[:-3]), heads, *tensor.shape[-2:])


def _mask(attn_mask: Tensor, query: Tensor, keys: int) -> dict[str, Tensor]:
    """The mask as an option of ``flash_attention``: ``key_mask`` or ``bias``."""
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor, got {type(attn_mask).__name__}")
    boolean = attn_mask.dtype == torch.bool
    if not boolean and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be of booleans or floats, got {attn_mask.dtype}")
    full = (*query.shape[:-1], keys)
    if len(attn_mask.shape) > len(full) or any(
        size not in (1, whole) for size, whole in zip(reversed(attn_mask.shape), reversed(full), strict=False)
    ):
        raise ValueError(f"attn_mask {tuple(attn_mask.shape)} does not broadcast to (..., H, L, S) = {full}")
    mask = attn_mask.reshape((1,) * (len(full) - attn_mask.dim()) + tuple(attn_mask.shape))
    while mask.dim() < 4:
        mask = mask[None]
    lead = query.shape[:-3]
    if mask.dim() > 4:  # several dimensions of batch become one
        shared = all(size == 1 for size in mask.shape[:-3])
        mask = mask.expand(*((1,) * len(lead) if shared else lead), *mask.shape[-3:])
        mask = mask.reshape(-1, *mask.shape[-3:])
    items = math.prod(lead)
    if boolean and mask.shape[1:3] == (1, 1):
        return {"key_mask": mask[:, 0, 0].expand(items, keys)}
    if boolean:
        zero = torch.zeros((), dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, zero, torch.full_like(zero, -torch.inf))
    return {"bias": mask.to(query.dtype).expand(*mask.shape[:2], query.shape[-2], keys)}
