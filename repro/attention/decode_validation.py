"""What can be wrong with the arguments of ``repro.decode_attention``, said before any launch.

``TypeError``: the wrong kind of thing (type, device, layout); ``ValueError``: the right kind with a
wrong value. Each message names both values that disagree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.arguments import whole
from analysis.shapes import scale_blocks
from kernels.decode import QUERIES_MAX
from kernels.decode_config import PAGE_UNIT, WIDE, WIDE_VALUES
from repro.attention.validation import DEVICES, DTYPES, FP8, HEAD_DIM_MAX, check_dense
from repro.attention.views import ALIGNMENT_BYTES

__all__ = ["FP8", "capacity_of", "check_decode_arguments", "check_values"]


def capacity_of(k_cache: Tensor, block_table: Tensor | None) -> int:
    """Keys of a sequence that there is room for."""
    if block_table is None:
        return int(k_cache.shape[2])
    return int(block_table.shape[1] * k_cache.shape[1])


def check_decode_arguments(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seqlens_k: Tensor | None,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale_block: int | None = None,
    value_dim: int | None = None,
) -> None:
    """Raise ``TypeError`` or ``ValueError`` for shapes, types, devices and layouts that no kernel
    takes. The values of tensors are the business of :func:`check_values`."""
    caches = {"k_cache": k_cache} if v_cache is None else {"k_cache": k_cache, "v_cache": v_cache}
    for name, tensor in {"q": q, **caches}.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        check_dense(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got shape {tuple(tensor.shape)}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q has type {q.dtype}; supported are float16, bfloat16 and float32")
    if q.device.type not in DEVICES:
        raise TypeError(f"q is on {q.device}; kernels exist for cpu and cuda")
    _check_queries(q, latent=v_cache is None)
    _check_values_of_a_latent(q, v_cache, value_dim)
    for name, cache in caches.items():
        _check_cache(name, cache, q)
    if v_cache is not None and v_cache.shape != k_cache.shape:
        raise ValueError(f"k_cache and v_cache differ in shape: {tuple(k_cache.shape)}, {tuple(v_cache.shape)}")
    if v_cache is not None and v_cache.dtype != k_cache.dtype:
        raise TypeError(f"k_cache and v_cache differ in type: {k_cache.dtype}, {v_cache.dtype}")
    if block_table is None and k_cache.shape[0] != q.shape[0]:
        raise ValueError(f"q has {q.shape[0]} sequences, k_cache {k_cache.shape[0]}; pages need a block_table")
    kv_heads = k_cache.shape[1 if block_table is None else 2]
    if (q.shape[1] % kv_heads if kv_heads else q.shape[1]) != 0:
        raise ValueError(f"q has {q.shape[1]} heads, not a multiple of the cache's {kv_heads}")
    if block_table is not None:
        if not isinstance(block_table, Tensor) or block_table.dim() != 2:
            raise ValueError(f"block_table must be (B, max_pages), got {_shape_of(block_table)}")
        _check_index("block_table", block_table, (q.shape[0], block_table.shape[1]), q)
        page_size = k_cache.shape[1]
        if page_size == 0 or page_size % PAGE_UNIT:
            raise ValueError(
                f"k_cache has pages of {page_size} keys, not a multiple of {PAGE_UNIT}; its "
                "layout is (pages, page_size, Hkv, D)"
            )
        if page_size * block_table.shape[1] >= 2**31:
            raise ValueError(f"block_table has {block_table.shape[1]} columns of {page_size} keys, above 2**31")
    if seqlens_k is not None:
        _check_index("seqlens_k", seqlens_k, (q.shape[0],), q)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    _check_scales(q, k_cache, v_cache, block_table is not None, scales, scale_block)


def check_values(k_cache: Tensor, seqlens_k: Tensor | None, block_table: Tensor | None) -> None:
    """Raise ``ValueError`` for a length that the cache has no room for, and for an entry of the
    table that a length makes use of and that names no page. Waits for a GPU's tensors."""
    capacity = capacity_of(k_cache, block_table)
    if seqlens_k is not None and seqlens_k.numel():
        least, most = (int(x) for x in torch.aminmax(seqlens_k))
        if least < 0:
            raise ValueError(f"seqlens_k has {least}, below 0")
        if most > capacity:
            room = (
                ""
                if block_table is None
                else (f": block_table has {block_table.shape[1]} columns of {k_cache.shape[1]} keys")
            )
            raise ValueError(f"seqlens_k has {most}, the cache room for {capacity}{room}")
    if block_table is None or block_table.numel() == 0:
        return
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    used = torch.ones_like(block_table, dtype=torch.bool)
    if seqlens_k is not None:
        used = columns * k_cache.shape[1] < seqlens_k[:, None]
    bad = used & ((block_table < 0) | (block_table >= k_cache.shape[0]))
    if bool(bad.any()):
        row, column = (int(x) for x in bad.nonzero()[0])
        raise ValueError(
            f"block_table[{row}, {column}] is {int(block_table[row, column])}, the cache has {k_cache.shape[0]} pages"
        )


def _check_queries(q: Tensor, *, latent: bool) -> None:
    seqlen_q, head_dim = q.shape[2:]
    if seqlen_q > QUERIES_MAX:
        raise ValueError(
            f"q has {seqlen_q} queries a sequence, above {QUERIES_MAX}: repro.flash_attention takes any number"
        )
    most = WIDE if latent and q.dtype != torch.float32 else HEAD_DIM_MAX
    if not 1 <= head_dim <= most:
        raise ValueError(
            f"head dimension must be 1 to {most}, got {head_dim}"
            + ("" if most == WIDE else f" (to {WIDE} with 16-bit q and v_cache=None)")
        )


def _check_values_of_a_latent(q: Tensor, v_cache: Tensor | None, value_dim: int | None) -> None:
    head_dim = q.shape[3]
    if value_dim is not None:
        whole("value_dim", value_dim, least=1)
    if head_dim <= HEAD_DIM_MAX:
        if value_dim is not None:
            raise ValueError(
                f"value_dim={value_dim} is for latents of more than {HEAD_DIM_MAX} columns, q has {head_dim}"
            )
        return
    most = min(WIDE_VALUES, head_dim)
    if value_dim is None or value_dim > most or value_dim % 8:
        raise ValueError(
            f"a latent of {head_dim} columns needs value_dim, a multiple of 8 up to {most}, got {value_dim}"
        )


def _check_cache(name: str, cache: Tensor, q: Tensor) -> None:
    """A cache is read where it lies: copying it in every step would cost more than the step."""
    fp8 = cache.dtype == FP8
    if fp8 and q.dtype == torch.float32:
        raise TypeError(f"{name} is {cache.dtype}, which is multiplied in 16 bits; q is {q.dtype}")
    if not fp8 and cache.dtype != q.dtype:
        raise TypeError(f"q and {name} differ in type: {q.dtype} and {cache.dtype}")
    if cache.device != q.device:
        raise TypeError(f"q and {name} are on different devices: {q.device}, {cache.device}")
    if cache.shape[3] != q.shape[3]:
        raise ValueError(f"q and {name} differ in head dimension: {q.shape[3]}, {cache.shape[3]}")
    unit = 16 if fp8 else 8
    if q.shape[3] % unit:
        raise ValueError(
            f"head dimension {q.shape[3]} is not a multiple of {unit}, as a cache of "
            f"{cache.dtype} needs: pad it when it is made"
        )
    size = cache.element_size()
    strides = [stride * size for n, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True) if n > 1]
    if cache.numel() and (
        cache.stride(3) != 1
        or any(stride % ALIGNMENT_BYTES for stride in strides)
        # A compiler's tensors have no address yet; the kernels' driver looks again.
        or (not torch.compiler.is_compiling() and cache.data_ptr() % ALIGNMENT_BYTES)
    ):
        raise ValueError(
            f"{name} has strides {cache.stride()} of {size} bytes: rows must be contiguous and "
            f"start on multiples of {ALIGNMENT_BYTES} bytes"
        )


def _check_index(name: str, tensor: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be an int32 tensor, got {kind}")
    check_dense(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.device != q.device:
        raise TypeError(f"q and {name} are on different devices: {q.device}, {tensor.device}")


def _check_scales(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, paged: bool, scales: dict[str, Tensor | None], block: int | None
) -> None:
    items, kv_heads, keys = (k_cache.shape[d] for d in ((0, 2, 1) if paged else (0, 1, 2)))
    shape: tuple[int, ...] = (kv_heads,)
    meaning = "(Hkv,)"
    if block is not None:
        if k_cache.dtype != FP8:
            raise ValueError(f"scale_block={block} is for {FP8}, k_cache is {k_cache.dtype}")
        blocks = scale_blocks(keys, whole("scale_block", block, least=1))
        shape = (items, blocks, kv_heads) if paged else (items, kv_heads, blocks)
        meaning = "(pages, blocks, Hkv)" if paged else "(B, Hkv, blocks)"
        needed = ("k_scale",) if v_cache is None else ("k_scale", "v_scale")
        missing = [name for name in needed if scales[name] is None]
        if missing:
            raise ValueError(f"scale_block={block} without {missing[0]}")
    for name, tensor in scales.items():
        if tensor is None:
            continue
        if k_cache.dtype != FP8:
            raise ValueError(f"{name} is for a cache of {FP8}, k_cache is {k_cache.dtype}")
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a float32 tensor, got {kind}")
        check_dense(name, tensor)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {meaning} = {shape}, got {tuple(tensor.shape)}")
        if tensor.device != q.device:
            raise TypeError(f"q and {name} are on different devices: {q.device}, {tensor.device}")
    if v_cache is None and scales["v_scale"] is not None:
        raise ValueError("v_scale without v_cache: the values are the keys and have k_scale")


def _shape_of(thing: object) -> str:
    return str(tuple(thing.shape)) if isinstance(thing, Tensor) else type(thing).__name__
