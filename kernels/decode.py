"""Few queries, a long cache, on arrays: ``flash_decode.cu`` and ``flash_decode_merge.cu``.

Arrays, in the io dtype unless said otherwise; the last dimension is contiguous:

    q, out        (B, H, Nq, D)
    k, v          (B, Hkv, Nk, D), or with a block table (pages, Hkv, page_size, D); uint8 where
                  scales are given: e4m3. v is None where the values are the keys; of keys with
                  more than 256 columns the first ones, as many as out has, up to 512
    lse           (B, H, Nq) fp32
    seqlens       (B,) int32: keys of each sequence
    block_table   (B, columns) int32, dense: the page of keys page_size · column and on
    k_scale, v_scale  (Hkv,) fp32; with scale_block a scale for as many keys of a sequence or page:
                  (B or pages, Hkv, ceil(Nk or page_size / scale_block), 1) fp32

What ``seqlens`` and ``block_table`` hold is not looked at here: their values may be on a device.
"""

from __future__ import annotations

import numpy as np

from analysis.arguments import checked
from analysis.decode import best_splits
from analysis.shapes import scale_blocks
from kernels.checks import check_alignment, finite, require_int32
from kernels.decode_config import MERGE_WARPS, PAGE_UNIT, WIDE_VALUES, DecodeConfig, configure, padded_columns
from kernels.flash_config import DTYPE_CODE, HEAD_DIMS, SHARED_LIMIT_BYTES
from kernels.launch import Argument, Array, Backend, Count, Size, Word

QUERIES_MAX = 16
"""Queries a sequence at most; more are the business of ``kernels.attention``."""


@checked
def forward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array | None,
    out: Array,
    lse: Array,
    *,
    scale: float,
    causal: bool = True,
    seqlens: Array | None = None,
    block_table: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    scale_block: Count | None = None,
    splits: Count | None = None,
    shared_limit_bytes: Size = SHARED_LIMIT_BYTES,
    stream: Word | None = None,
) -> None:
    """out = softmax(scale · q kᵀ) v and lse, a sequence's keys shared out over ``splits`` blocks.

    Raises:
        TypeError, ValueError: before anything is launched, naming the values that disagree.
    """
    check_arrays(q, k, v, out, lse, seqlens, block_table, k_scale, v_scale, scale_block)
    scale = finite(scale)
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, value_dim = k.shape[1], out.shape[3]
    group = heads // kv_heads if kv_heads else 1
    seqlen_k = k.shape[2] if block_table is None else block_table.shape[1] * k.shape[2]
    rows = batch * heads * seqlen_q
    if rows == 0:
        return
    features = {
        "causal": causal,
        "seqlens": seqlens is not None,
        "paged": block_table is not None,
        "fp8": k_scale is not None,
        "scale_blocks": scale_block is not None,
        "latent": v is None,
    }
    row_count = group * seqlen_q
    config = configure(q.dtype, head_dim, row_count, limit=shared_limit_bytes, **features)
    row_tiles = -(-row_count // config.tile.block_m)
    blocks = batch * kv_heads * row_tiles
    if splits is None:
        splits = default_splits(config, blocks, seqlen_k, row_count, backend.multiprocessors, shared_limit_bytes)
    if splits > 1:
        config = configure(q.dtype, head_dim, row_count, limit=shared_limit_bytes, split=True, **features)
    results = [out.with_access("w", "out"), lse.with_access("w", "lse")]
    partial: list[Array] = []
    if splits > 1:
        # Splits without keys leave their part of these alone.
        partial = [
            backend.empty("part_out", (batch * splits, heads, seqlen_q, value_dim), "fp32"),
            backend.empty("part_lse", (batch, heads, seqlen_q, splits), "fp32"),
        ]
    args: list[Argument] = [q.with_access("r", "q"), k.with_access("r", "k")]
    if v is not None:
        args.append(v.with_access("r", "v"))
    args += [part.with_access("rw") for part in partial] or results
    args += [np.int32(n) for n in (kv_heads, group, seqlen_q, seqlen_k, head_dim, splits)]
    args.append(np.float32(scale))
    if config.wide:
        args.append(np.int32(value_dim))
    lengths: list[Argument] = []
    if seqlens is not None:
        lengths = [seqlens.with_access("r", "seqlens")]
    args += lengths
    if block_table is not None:
        args += [block_table.with_access("r", "block_table")]
        args += [np.int32(block_table.shape[1]), np.int32(k.shape[2])]
    if k_scale is not None:
        args.append(k_scale.with_access("r", "k_scale"))
    if v_scale is not None:
        args.append(v_scale.with_access("r", "v_scale"))
    if scale_block is not None:
        args.append(np.int32(scale_block))
    grid = (blocks * splits, 1, 1)
    backend.launch(config.kernel(), grid, config.shared_bytes, args, stream)
    if splits > 1:
        args = [part.with_access("r") for part in partial]
        args += results
        args += [np.int32(n) for n in (heads, seqlen_q, seqlen_k, value_dim, splits, rows)]
        args += lengths
        backend.launch(config.merge_kernel(), (-(-rows // MERGE_WARPS), 1, 1), 0, args, stream)


@checked
def default_splits(
    config: DecodeConfig,
    blocks: Count,
    seqlen_k: Size,
    rows: Count,
    multiprocessors: Count,
    limit: Size = SHARED_LIMIT_BYTES,
) -> int:
    """``analysis.decode.best_splits`` for a card with this many SMs, whose blocks may have
    ``limit`` bytes of shared memory."""
    at_once = multiprocessors * config.blocks_per_sm(limit)
    tile_rows = min(rows, config.tile.block_m)
    return best_splits(
        blocks=blocks,
        tiles=-(-seqlen_k // config.tile.block_n),
        at_once=at_once,
        tile_bytes=config.cache_tile_bytes,
        partial_bytes=config.partial_bytes(tile_rows),
    )


def check_arrays(
    q: Array,
    k: Array,
    v: Array | None,
    out: Array,
    lse: Array,
    seqlens: Array | None,
    block_table: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    scale_block: int | None = None,
) -> None:
    """Raise ValueError or TypeError for what the kernels would misread, naming both values."""
    if len(q.shape) != 4 or len(k.shape) != 4:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}, not four dimensions")
    require_int32("q", q.shape)
    require_int32("k", k.shape)
    batch, heads, seqlen_q, head_dim = q.shape
    pages, kv_heads, page_size, _ = k.shape
    padded_columns(head_dim)
    values = (*q.shape[:3], _value_columns(head_dim, v, out))
    if q.dtype not in DTYPE_CODE:
        raise TypeError(f"q has dtype {q.dtype}, not one of {list(DTYPE_CODE)}")
    if seqlen_q > QUERIES_MAX:
        raise ValueError(f"q has {seqlen_q} queries a sequence, above {QUERIES_MAX}")
    if k.shape[3] != head_dim:
        raise ValueError(f"q has head_dim={head_dim} but k {k.shape[3]}")
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}")
    if block_table is None and pages != batch:
        raise ValueError(f"q has {batch} sequences but k {pages}")
    if block_table is not None:
        if page_size == 0 or page_size % PAGE_UNIT:
            raise ValueError(f"page_size={page_size} is not a multiple of {PAGE_UNIT}")
        _check_whole("block_table", block_table, "int32", (batch, block_table.shape[-1]))
        require_int32("the cache", (block_table.shape[-1] * page_size,))
    if seqlens is not None:
        _check_whole("seqlens", seqlens, "int32", (batch,))
    fp8 = k_scale is not None
    if fp8 != (v_scale is not None) and v is not None:
        raise ValueError("k_scale and v_scale go together, one of them is None")
    if v is None and v_scale is not None:
        raise ValueError("v_scale without v: the values are the keys and have their scale")
    blocks = scale_blocks(page_size, scale_block)
    if scale_block is not None and not fp8:
        raise ValueError(f"scale_block={scale_block} without k_scale")
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is not None and scale_block is None:
            _check_whole(name, scales, "fp32", (kv_heads,))
        elif scales is not None and (scales.dtype != "fp32" or scales.shape != (pages, kv_heads, blocks, 1)):
            raise ValueError(f"{name} is {scales.dtype} {scales.shape}, not fp32 {(pages, kv_heads, blocks, 1)}")
    if fp8 and head_dim % 16:
        raise ValueError(f"head_dim={head_dim} is not a multiple of 16, as an fp8 cache needs")
    cache = "uint8" if fp8 else q.dtype
    wanted = {"q": (q, q.dtype, q.shape), "k": (k, cache, k.shape), "out": (out, q.dtype, values)}
    if v is not None:
        wanted["v"] = (v, cache, k.shape)
    for name, (array, dtype, shape) in wanted.items():
        if array.dtype != dtype:
            raise TypeError(f"{name} has dtype {array.dtype}, not {dtype}")
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")
        check_alignment(name, array)
    if lse.dtype != "fp32" or lse.shape != q.shape[:3]:
        raise ValueError(f"lse is {lse.dtype} {lse.shape}, not fp32 {q.shape[:3]}")


def _value_columns(head_dim: int, v: Array | None, out: Array) -> int:
    """Columns that out has to have: those of q, or of a wide latent any number up to the limit."""
    if head_dim <= HEAD_DIMS[-1]:
        return head_dim
    if v is not None:
        raise ValueError(f"head_dim={head_dim} is above {HEAD_DIMS[-1]}: of a latent cache alone")
    columns = out.shape[-1] if len(out.shape) == 4 else 0
    most = min(WIDE_VALUES, head_dim)
    if not 0 < columns <= most or columns % 8:
        raise ValueError(
            f"out has {columns} columns, not a multiple of 8 up to {most}, as values of a latent "
            f"of {head_dim} columns have"
        )
    return columns


def _check_whole(name: str, array: Array, dtype: str, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, not {dtype} {shape}")
    if len(shape) == 2 and shape[0] > 1 and array.strides[0] != shape[1]:
        raise ValueError(f"{name} has strides {array.strides}, not {(shape[1], 1)}")
