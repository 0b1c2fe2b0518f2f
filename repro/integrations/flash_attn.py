"""FlashAttention's own functions, with its names, layouts and meanings, on this package's kernels.

Code written for ``flash_attn`` 2.x runs with ``from repro.integrations import flash_attn`` instead
of ``import flash_attn``, on a GPU and on a CPU. Tensors are (B, N, H, D), or (total, H, D) where
sequences are packed. What no kernel here takes is refused in words. ``return_attn_probs`` gives
``(out, lse, None)``: the third, dropout's pattern for FlashAttention's own tests, does not exist.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from analysis.arguments import whole
from kernels.decode import QUERIES_MAX
from repro.attention.decode import decode_attention
from repro.attention.operator import flash_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q (B, Nq, H, D), k and v (B, Nk, Hkv, D) -> out (B, Nq, H, D), lse (B, H, Nq)."""
    out, lse = _attend(
        [tensor.transpose(1, 2) for tensor in (q, k, v)],
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return _results(out.transpose(1, 2), lse, return_attn_probs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """qkv (B, N, 3, H, D); options of :func:`flash_attn_func`."""
    return flash_attn_func(*_parts("qkv", qkv, 3), *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """q (B, Nq, H, D), kv (B, Nk, 2, Hkv, D); options of :func:`flash_attn_func`."""
    return flash_attn_func(q, *_parts("kv", kv, 2), *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    block_table: Tensor | None = None,
    **options: Any,
) -> Any:
    """q (total_q, H, D), k and v (total_k, Hkv, D) -> out (total_q, H, D), lse (H, total_q).

    Options of :func:`flash_attn_func`, in its order. ``max_seqlen_*`` are not needed and must not
    be below the longest sequence (not checked, as in FlashAttention). With a ``block_table`` k and
    v are (pages, page_size, Hkv, D), of which each sequence's keys are copied out.
    """
    if block_table is not None:
        lengths = cu_seqlens_k.diff()
        k, v, cu_seqlens_k = _gathered(k, v, block_table, torch.zeros_like(lengths), lengths)
    given = inspect.signature(flash_attn_func).bind(q, k, v, *args, **options).arguments
    everything = given.pop("return_attn_probs", False)
    out, lse = _attend(
        [given.pop(name).transpose(0, 1)[None] for name in ("q", "k", "v")],
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        **given,
    )
    return _results(out[0].transpose(0, 1), lse[0], everything)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """qkv (total, 3, H, D); options of :func:`flash_attn_varlen_func`."""
    q, k, v = _parts("qkv", qkv, 3)
    tables = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *tables, *args, **options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **options: Any,
) -> Any:
    """q (total_q, H, D), kv (total_k, 2, Hkv, D); options of :func:`flash_attn_varlen_func`."""
    k, v = _parts("kv", kv, 2)
    tables = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, k, v, *tables, *args, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """q (B, Nq, H, D) against a cache (B_cache, Nk, Hkv, D), or in pages (pages, size, Hkv, D).

    New keys and values (B, Nnew, Hkv, D) are written into the cache at ``cache_seqlens`` first,
    rotated where ``rotary_cos`` and ``rotary_sin`` (positions, half the rotated columns) are given;
    q is rotated too. Plain calls of up to 16 queries read the cache where it lies
    (``repro.decode_attention``); a window, softcap, ALiBi, left padding, chosen items and more
    queries work on a copy of the keys in use. Returns out (B, Nq, H, D), and lse (B, H, Nq).
    """
    batch, rows = q.shape[:2]
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    before = _lengths(cache_seqlens, batch, room, q.device)
    if (k is None) != (v is None):
        raise ValueError("k and v are appended together, got one of them alone")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin go together, got one of them alone")
    after = before if k is None else before + k.shape[1]
    if batch and (int(before.min()) < 0 or int(after.max()) > room):
        raise ValueError(f"the cache has room for {room} keys, {int(before.min())} to {int(after.max())} are wanted")
    if rotary_cos is not None and rotary_sin is not None:
        if k is None:
            raise ValueError("rotary_cos without k: keys in the cache are rotated already")
        tables = (rotary_cos, rotary_sin, rotary_interleaved)
        moving = causal or tuple(window_size) != (-1, -1)
        q = _rotated(q, *tables, _positions(before, rows if moving else 1).expand(batch, rows))
        k = _rotated(k, *tables, _positions(before, k.shape[1]))
    items = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
    if k is not None and v is not None:
        places = _places(items, block_table, _positions(before, k.shape[1]), k_cache.shape[1])
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[places // cache.shape[1], places % cache.shape[1]] = new
    plain = alibi_slopes is None and not softcap and tuple(window_size) == (-1, -1)
    plain = plain and cache_leftpad is None and cache_batch_idx is None
    if plain and rows <= QUERIES_MAX and q.shape[3] % 8 == 0:
        caches = (
            (k_cache[:batch].transpose(1, 2), v_cache[:batch].transpose(1, 2))
            if block_table is None
            else (k_cache, v_cache)
        )
        out, lse = decode_attention(
            q.transpose(1, 2),
            *caches,
            seqlens_k=after.int(),
            block_table=block_table,
            scale=softmax_scale,
            causal=causal,
            splits=whole("num_splits", num_splits, least=0) or None,
            return_lse=True,
        )
    else:
        left = torch.zeros_like(after) if cache_leftpad is None else cache_leftpad.to(after)
        table = items[:, None] if block_table is None else block_table
        keys, values, starts = _gathered(k_cache, v_cache, table, left, after - left)
        out, lse = _attend(
            [tensor.transpose(0, 1)[None] for tensor in (q.flatten(0, 1), keys, values)],
            cu_seqlens_q=torch.arange(0, (batch + 1) * rows, rows, device=q.device).int(),
            cu_seqlens_k=starts,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
        out, lse = (tensor[0].unflatten(1, (batch, rows)).transpose(0, 1) for tensor in (out, lse))
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _attend(tensors: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of :func:`repro.flash_attention` with FlashAttention's options."""
    named = {_NAMES.get(name, name): value for name, value in options.items()}
    named["window"] = _window(named.get("window", (-1, -1)))
    named["softcap"] = named.get("softcap") or None
    out, lse = flash_attention(*tensors, **named, return_lse=True)
    return out, lse


#: What FlashAttention calls otherwise.
_NAMES = {"softmax_scale": "scale", "window_size": "window"}


def _window(window_size: tuple[int, int]) -> tuple[int | None, int | None] | None:
    """-1 is FlashAttention's word for an unlimited side."""
    left, right = (None if side == -1 else side for side in window_size)
    return None if left is None and right is None else (left, right)


def _results(out: Tensor, lse: Tensor, everything: bool) -> Any:
    return (out, lse, None) if everything else out


def _parts(name: str, packed: Tensor, count: int) -> Any:
    """q, k, v of one tensor (..., count, H, D)."""
    if packed.dim() < 4 or packed.shape[-3] != count:
        raise ValueError(f"{name} must be (..., {count}, H, D), got {tuple(packed.shape)}")
    return packed.unbind(-3)


def _lengths(given: int | Tensor | None, batch: int, room: int, device: torch.device) -> Tensor:
    if isinstance(given, Tensor):
        return given.to(device, torch.int64)
    return torch.full((batch,), room if given is None else given, device=device)


def _positions(first: Tensor, count: int) -> Tensor:
    """(B, count): the places from each sequence's ``first`` on."""
    return first[:, None] + torch.arange(count, device=first.device)


def _places(items: Tensor, block_table: Tensor | None, positions: Tensor, size: int) -> Tensor:
    """Row of each (sequence, position) in a cache whose first two dimensions are one."""
    if block_table is None:
        return items[:, None] * size + positions
    return block_table.long().gather(1, positions // size) * size + positions % size


def _gathered(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, first: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in use as packed sequences (total, Hkv, D), and where each starts."""
    size = k_cache.shape[1]
    sequence = torch.repeat_interleave(lengths.long())
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    position = torch.arange(len(sequence), device=table.device) - starts[sequence]
    position = position + first.long()[sequence]
    page = table.long()[sequence, position // size]
    keys, values = (cache[page, position % size] for cache in (k_cache, v_cache))
    return keys, values, starts.int()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of the first columns of x (B, N, H, D), in float32.

    interleaved: pairs are (0, 1), (2, 3), ...; otherwise the halves of the rotated columns.
    """
    half = cos.shape[1]
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else (rotated[..., :half], rotated[..., half:])
    c, s = (table.float()[positions][:, :, None] for table in (cos, sin))
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)
