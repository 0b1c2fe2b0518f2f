"""``repro.decode_attention``: few queries, a long cache of keys and values, in pages or not.

The operator ``repro::decode_attention`` is registered with torch, so that a compiler sees one node.
It has no gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from analysis.arguments import flag, whole
from kernels import decode
from kernels.launch import Array, Backend
from repro.attention import engine, launcher
from repro.attention.decode_validation import FP8, capacity_of, check_decode_arguments, check_values
from repro.attention.validation import resolve_scale
from repro.attention.views import Views, array_of

__all__ = ["decode_attention"]


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale_block: int | None = None,
    value_dim: int | None = None,
    splits: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    check: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of a few new queries to a cache: one step of decoding.

    The keys of a sequence are split over thread blocks, each of which works on all query heads that
    share a key/value head, so that the cache is read once; a second kernel adds the parts up by
    their row sums (Flash-Decoding, Dao et al. 2023). CUDA tensors run on torch's current stream,
    CPU tensors run the same source on the host.

    Args:
        q: (B, H, Nq, D), float16, bfloat16 or float32, 1 ≤ Nq ≤ 16: the newest tokens, whose keys
            and values are in the cache already. Several where a draft is verified (speculation).
        k_cache: (B, Hkv, Nk, D), Hkv divides H; with a ``block_table`` (pages, page_size, Hkv, D),
            page_size a multiple of 16. Type of q, or float8_e4m3fn with 16-bit q. It is read where
            it lies, with any strides between rows; D is a multiple of 8 (fp8: of 16).
        v_cache: like ``k_cache``. None: the values are the keys, as in a latent cache whose
            projections are absorbed in q and in what follows (MLA). D is then up to 576 in 16 bits.
        seqlens_k: (B,) int32, keys of each sequence; default: all that there is room for.
        block_table: (B, max_pages) int32: entry (b, j) is the page of keys j·page_size and on of
            sequence b. Sequences may share pages; entries behind a sequence's end are not read.
        k_scale, v_scale: (Hkv,) float32, what the fp8 numbers of a head are multiplied with;
            default 1; of a latent k_scale is of the values too. With ``scale_block`` as the cache
            without D, its keys in blocks: (B, Hkv, ceil(Nk / scale_block)), (pages,
            ceil(page_size / scale_block), Hkv).
        scale_block: keys that share a scale, a multiple of 16; a page's size gives each page and
            head a scale of its own, so that a page can be written once and for all. No scale has a
            default then.
        value_dim: of a latent with more than 256 columns those, from the first, that are values: a
            multiple of 8 up to 512. DeepSeek-V2 and V3 cache 576 and have 512 values, the other 64
            carry positions. ``scale`` is theirs, not 1/sqrt(576).
        splits: parts that the keys of a sequence are split into; any number. Default: by the room
            of the cache and the card's multiprocessors (``analysis.decode.best_splits``). Results
            of different numbers of splits differ in their last bits.
        scale: default 1/sqrt(D).
        causal: query i of Nq sees key j when ``j <= i + seqlen - Nq``: the queries are the last
            tokens of their sequence. False: each sees all keys.
        return_lse: also return the logarithm of the row sums.
        check: look at the values of ``seqlens_k`` and ``block_table`` before the launch. For CUDA
            tensors this waits for the GPU; with False a length or page out of range is read.

    Returns:
        ``out`` (B, H, Nq, D), or of ``value_dim`` columns, in the type of q, or ``(out, lse)`` with
        ``lse`` (B, H, Nq) in float32. A row that sees no key has ``out = 0`` and ``lse = -inf``.

    Raises:
        TypeError: wrong type, layout or device of a tensor, wrong type of an option.
        ValueError: shapes that disagree, more than 16 queries, a page size or head dimension that
            kernels do not take, a length or a page that the cache does not have. Before any launch.
        RuntimeError: an input requires a gradient.

    Meta and fake tensors give the shapes of results, and their values are not looked at.

    Complexity: the bytes of the cache up to each length, once per 64 rows (heads of a group times
    queries), and 8·(D + 1) bytes a row and split for the parts.
    """
    check_decode_arguments(q, k_cache, v_cache, seqlens_k, block_table, k_scale, v_scale, scale_block, value_dim)
    if torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"repro.decode_attention has no gradient, and {name} requires one: use "
                    "repro.flash_attention to train, torch.no_grad() to decode"
                )
    return_lse = flag("return_lse", return_lse)
    out, lse = torch.ops.repro.decode_attention(
        q,
        k_cache,
        v_cache,
        seqlens_k,
        block_table,
        k_scale,
        v_scale,
        scale_block,
        value_dim,
        None if splits is None else whole("splits", splits, least=1),
        resolve_scale(scale, q.shape[3]),
        flag("causal", causal),
        flag("check", check),
    )
    return (out, lse) if return_lse else out


def _forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seqlens_k: Tensor | None,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale_block: int | None,
    value_dim: int | None,
    splits: int | None,
    scale: float,
    causal: bool,
    check: bool,
) -> tuple[Tensor, Tensor]:
    """The operator."""
    if check:
        check_values(k_cache, seqlens_k, block_table)
    out, lse = _results(q, *(None,) * 7, value_dim)
    if q.numel() == 0:
        return out, lse
    if capacity_of(k_cache, block_table) == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    heads = 1 if block_table is None else 2
    if k_cache.dtype == FP8:
        ones = torch.ones(k_cache.shape[heads], dtype=torch.float32, device=q.device)
        k_scale = ones if k_scale is None else k_scale
        if v_cache is not None:
            v_scale = ones if v_scale is None else v_scale
    if scale_block is not None:  # as kernels take them: heads before blocks, and one number a row
        k_scale, v_scale = (None if x is None else x.transpose(1, heads)[..., None] for x in (k_scale, v_scale))
    caches = {"k": _by_heads(k_cache, heads)}
    if v_cache is not None:
        caches["v"] = _by_heads(v_cache, heads)
    rows = {"q": q, **caches, "out": out}
    indices: dict[str, Tensor | None] = {
        "lse": lse,
        "seqlens": seqlens_k,
        "block_table": block_table,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    tensors = rows | {name: tensor for name, tensor in indices.items() if tensor is not None}
    options = {"splits": splits, "scale": scale, "causal": causal, "scale_block": scale_block}
    layouts = [(name, t.shape, t.stride(), t.dtype) for name, t in tensors.items()]
    key = ("decode", launcher.backend_of(q.device), q.device, *options.values(), *layouts)
    if not engine.again(key, tensors.values(), rows=len(rows)):
        _first(key, tensors, caches, options)
    return out, lse


def _first(
    key: Hashable, tensors: Mapping[str, Tensor], caches: Mapping[str, Tensor], options: Mapping[str, Any]
) -> None:
    """Record what the driver launches, run it, and keep it unless a tensor had to be copied. A step
    of decoding is short, and the next one differs in nothing but addresses and lengths."""
    device = tensors["q"].device
    limit = engine.shared_limit(device)

    def driver(backend: Backend, at: dict[str, Array]) -> None:
        given: dict[str, Any] = {"v": None} | at
        decode.forward(backend, **given, **options, shared_limit_bytes=limit)

    with ExitStack() as results:
        views = Views()
        arrays: dict[str, Array] = {}
        for name, tensor in tensors.items():
            if name == "out":
                arrays[name] = array_of(name, results.enter_context(views.written(name, tensor)))
            elif name == "q":
                arrays[name] = views.readable(name, tensor)
            elif name in caches or tensor.dim() == 4:  # scales of blocks of keys
                arrays[name] = array_of(name, tensor)
            else:
                arrays[name] = views.dense(name, tensor)
        engine.first(driver, tensors, arrays, key)
    launcher.note_copies(device, views.copied)


def _by_heads(cache: Tensor, heads: int) -> Tensor:
    """The cache as (sequences or pages, Hkv, keys, D), its bits where it is fp8."""
    if cache.dtype == FP8:
        cache = cache.view(torch.uint8)
    return cache.transpose(1, heads) if heads == 2 else cache


def _results(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Memory for out and lse. others: the operator's other inputs, ``value_dim`` the eighth."""
    columns = q.shape[3] if others[7] is None else others[7]
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return q.new_empty(*q.shape[:3], columns), lse


_LIBRARY = torch.library.Library("repro", "FRAGMENT")
_LIBRARY.define(
    "decode_attention(Tensor q, Tensor k_cache, Tensor? v_cache, Tensor? seqlens_k, "
    "Tensor? block_table, Tensor? k_scale, Tensor? v_scale, int? scale_block, int? value_dim, "
    "int? splits, float scale, bool causal, bool check) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("decode_attention", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("repro::decode_attention", _results, lib=_LIBRARY)
