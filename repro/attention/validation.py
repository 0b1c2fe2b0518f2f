"""Everything that can be wrong with the arguments, said before anything is launched.

Each message names both values that disagree. ``TypeError``: the wrong kind of thing (type,
device, layout of a tensor's numbers); ``ValueError``: the right kind with a wrong value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from analysis import arguments
from analysis.algorithms import ORDERS
from analysis.shapes import scale_blocks
from kernels.scores import capped
from repro.attention.options import Options

__all__ = [
    "DEVICES",
    "DTYPES",
    "FP8",
    "HEAD_DIM_MAX",
    "check_arguments",
    "resolve",
    "resolve_order",
    "resolve_scale",
    "resolve_softcap",
    "resolve_tile",
]

#: torch type -> the name the kernels and the records use.
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
#: Where tensors may be: on "meta" shapes and types alone are worked out, as for fake tensors.
DEVICES = ("cpu", "cuda", "meta")
#: What k and v may be beside the type of q.
FP8 = torch.float8_e4m3fn
HEAD_DIM_MAX = 256
TABLES = ("cu_seqlens_q", "cu_seqlens_k")
#: Kernels multiply the scale by log2(e), in float32.
SCALE_MAX = torch.finfo(torch.float32).max / math.log2(math.e)


def check_arguments(q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    """Raise ``TypeError`` or ``ValueError`` for anything the operator cannot compute, but for the
    values of the tables of packed sequences (``repro.attention.packed``) and what :func:`resolve`
    refuses."""
    _check_tensors(q, k, v)
    _check_key_scales(q, k, options.k_scale, options.v_scale, options.scale_block)
    arguments.probability("dropout_p", options.dropout_p)
    tile, key_mask, block_mask = resolve_tile(options.tile), options.key_mask, options.block_mask
    if options.cu_seqlens_q is not None or options.cu_seqlens_k is not None:
        _check_tables(
            q,
            options.cu_seqlens_q,
            options.cu_seqlens_k,
            key_mask=key_mask is not None,
            block_mask=block_mask is not None,
            bias=options.bias is not None,
            sink_logits=options.sink_logits is not None,
            **{f"order='{options.order}'": options.order != "rows", "k and v of e4m3": k.dtype == FP8},
        )
    if key_mask is not None:
        _check_key_mask(key_mask, q, k)
    if block_mask is not None:
        _check_block_mask(block_mask, q, k, tile)
    if options.alibi_slopes is not None:
        _check_alibi_slopes(options.alibi_slopes, q, options.cu_seqlens_q)
    if options.bias is not None:
        _check_bias(options.bias, q, k)
    if options.sink_logits is not None:
        _check_sink_logits(options.sink_logits, q)


def resolve(options: Options, head_dim: int) -> Options:
    """The options with every value of the type that the operator has it in.

    TypeError or ValueError for what stands for no such value.
    """
    found = options._replace(
        scale=resolve_scale(options.scale, head_dim),
        dropout_p=float(options.dropout_p),
        tile=resolve_tile(options.tile),
        order=resolve_order(options.order),
        softcap=resolve_softcap(options.softcap),
        sinks=arguments.whole("sinks", options.sinks, least=0),
    )
    more: dict[str, Any] = {name: arguments.flag(name, getattr(options, name)) for name in ("causal", "deterministic")}
    if options.scale_block is not None:
        more["scale_block"] = int(options.scale_block)
    return found._replace(**more)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        check_dense(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (B, H, N, D), got {tensor.dim()}: shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES and (name == "q" or tensor.dtype != FP8):
            raise TypeError(
                f"{name} has type {tensor.dtype}; supported are float16, bfloat16 and float32"
                + ("" if name == "q" else ", and float8_e4m3fn with 16-bit q")
            )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype not in (q.dtype, FP8) or (tensor.dtype == FP8 and q.dtype == torch.float32):
            raise TypeError(f"q and {name} differ in type: {q.dtype} and {tensor.dtype}")
        if tensor.device != q.device:
            raise TypeError(f"q and {name} are on different devices: {q.device}, {tensor.device}")
    if k.dtype != v.dtype:
        raise TypeError(f"k and v differ in type: {k.dtype} and {v.dtype}")
    if q.device.type not in DEVICES:
        raise TypeError(f"q is on {q.device}; kernels exist for cpu and cuda")
    if k.shape != v.shape:
        raise ValueError(f"k and v differ in shape: {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k differ in batch: {q.shape[0]} and {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k differ in head dimension: {q.shape[3]} and {k.shape[3]}")
    if not 1 <= q.shape[3] <= HEAD_DIM_MAX:
        raise ValueError(f"head dimension must be 1 to {HEAD_DIM_MAX}, got {q.shape[3]}")
    if k.dtype == FP8 and q.shape[3] % 16:
        raise ValueError(
            f"head dimension {q.shape[3]} is not a multiple of 16, as k and v of {FP8} need: pad "
            "them when they are made"
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"q has {heads} heads, not a multiple of the {kv_heads} heads of k and v")


def check_dense(name: str, tensor: Tensor) -> None:
    """Kernels address elements by strides."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        raise TypeError(f"{name} is {kind}; kernels take dense (strided) tensors")


def resolve_tile(tile: Sequence[int] | None) -> list[int] | None:
    """[block_m, block_n] as ints, or None. TypeError for anything but two whole numbers."""
    if tile is None:
        return None
    if isinstance(tile, str) or not isinstance(tile, Sequence) or len(tile) != 2:
        raise TypeError(f"tile must be (block_m, block_n), two whole numbers, got {tile!r}")
    names = ("block_m", "block_n")
    return [arguments.whole(f"tile {name}", edge, least=1) for name, edge in zip(names, tile, strict=True)]


def _check_key_mask(key_mask: Tensor, q: Tensor, k: Tensor) -> None:
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        kind = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise TypeError(f"key_mask must be a boolean tensor (True = takes part), got {kind}")
    check_dense("key_mask", key_mask)
    if key_mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(f"key_mask must have shape (B, Nk) = {(k.shape[0], k.shape[2])}, got {tuple(key_mask.shape)}")
    if key_mask.device != q.device:
        raise TypeError(f"q and key_mask are on different devices: {q.device}, {key_mask.device}")


def _check_block_mask(block_mask: Tensor, q: Tensor, k: Tensor, tile: Sequence[int] | None) -> None:
    if not isinstance(block_mask, Tensor) or block_mask.dtype != torch.bool:
        kind = block_mask.dtype if isinstance(block_mask, Tensor) else type(block_mask).__name__
        raise TypeError(f"block_mask must be a boolean tensor (True = computed), got {kind}")
    check_dense("block_mask", block_mask)
    if block_mask.device != q.device:
        raise TypeError(f"q and block_mask are on different devices: {q.device}, {block_mask.device}")
    if tile is None:
        raise ValueError(
            f"block_mask {tuple(block_mask.shape)} needs tile=(block_m, block_n), got None: the block size is the tile"
        )
    batch, heads, seqlen_q, _ = q.shape
    rows = -(-seqlen_q // tile[0])
    columns = -(-k.shape[2] // tile[1])
    allowed = [(rows, columns), (heads, rows, columns), (batch, heads, rows, columns)]
    if tuple(block_mask.shape) not in allowed:
        raise ValueError(
            f"block_mask must have shape {allowed[0]}, {allowed[1]} or {allowed[2]} "
            f"for tile {tuple(tile)}, got {tuple(block_mask.shape)}"
        )


def _check_alibi_slopes(slopes: Tensor, q: Tensor, cu_seqlens_q: Tensor | None) -> None:
    if not isinstance(slopes, Tensor) or slopes.dtype != torch.float32:
        kind = slopes.dtype if isinstance(slopes, Tensor) else type(slopes).__name__
        raise TypeError(f"alibi_slopes must be a float32 tensor, got {kind}")
    check_dense("alibi_slopes", slopes)
    items, heads = q.shape[:2]
    named = "B"
    if cu_seqlens_q is not None:
        items, named = cu_seqlens_q.shape[0] - 1, "sequences"
    if tuple(slopes.shape) not in ((heads,), (items, heads)):
        raise ValueError(
            f"alibi_slopes must have shape (H,) = {(heads,)} or ({named}, H) = {(items, heads)}, "
            f"got {tuple(slopes.shape)}"
        )
    if slopes.device != q.device:
        raise TypeError(f"q and alibi_slopes are on different devices: {q.device}, {slopes.device}")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires a gradient, and none is implemented: pass alibi_slopes.detach()")


def _check_sink_logits(logits: Tensor, q: Tensor) -> None:
    if not isinstance(logits, Tensor) or logits.dtype != torch.float32:
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"sink_logits must be a float32 tensor, got {kind}")
    check_dense("sink_logits", logits)
    if logits.shape != q.shape[1:2]:
        raise ValueError(f"sink_logits must have shape (H,) = {tuple(q.shape[1:2])}, got {tuple(logits.shape)}")
    if logits.device != q.device:
        raise TypeError(f"q and sink_logits are on different devices: {q.device}, {logits.device}")


def _check_key_scales(q: Tensor, k: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, block: int | None) -> None:
    if block is not None:
        arguments.whole("scale_block", block, least=1)
    given = {"k_scale": k_scale, "v_scale": v_scale, "scale_block": block}
    if k.dtype != FP8:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is for k and v of {FP8}, k is {k.dtype}")
        return
    batch, kv_heads, keys = k.shape[:3]
    per_head = block is None
    shape = (kv_heads,) if per_head else (batch, kv_heads, scale_blocks(keys, block))
    meaning = "(Hkv,)" if per_head else "(B, Hkv, ceil(Nk / scale_block))"
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is None:
            if per_head:
                continue
            raise ValueError(f"scale_block={block} without {name}")
        if not isinstance(scales, Tensor) or scales.dtype != torch.float32:
            kind = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
            raise TypeError(f"{name} must be a float32 tensor, got {kind}")
        check_dense(name, scales)
        if tuple(scales.shape) != shape:
            raise ValueError(f"{name} must have shape {meaning} = {shape}, got {tuple(scales.shape)}")
        if scales.device != q.device:
            raise TypeError(f"q and {name} are on different devices: {q.device}, {scales.device}")


def _check_bias(bias: Tensor, q: Tensor, k: Tensor) -> None:
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias must be a torch.Tensor, got {type(bias).__name__}")
    check_dense("bias", bias)
    if bias.dtype != q.dtype:
        raise TypeError(f"q and bias differ in type: {q.dtype} and {bias.dtype}")
    if bias.device != q.device:
        raise TypeError(f"q and bias are on different devices: {q.device}, {bias.device}")
    batch, heads, rows = q.shape[:3]
    fits = bias.dim() == 4 and bias.shape[2:] == (rows, k.shape[2])
    if not fits or bias.shape[0] not in (1, batch) or bias.shape[1] not in (1, heads):
        raise ValueError(
            f"bias must have shape (1 or B, 1 or H, Nq, Nk) = (1 or {batch}, 1 or {heads}, {rows}, "
            f"{k.shape[2]}), got {tuple(bias.shape)}"
        )


def _check_tables(q: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, **others: bool) -> None:
    """Raise ``TypeError`` or ``ValueError`` for tables of a wrong kind or shape, and for other
    options that packed sequences do not go with. Their values are checked where they are read
    (``repro.attention.packed``).

    others: options by what a message calls them, and whether they are asked for.
    """
    tables = dict(zip(TABLES, (cu_seqlens_q, cu_seqlens_k), strict=True))
    missing = [name for name, table in tables.items() if table is None]
    if missing:
        given = next(name for name in TABLES if name not in missing)
        raise ValueError(f"{given} without {missing[0]}: both say where the sequences start")
    asked = [name for name, there in others.items() if there]
    if asked:
        raise ValueError(f"cu_seqlens_q and {', '.join(asked)} exclude each other")
    for name, table in tables.items():
        if not isinstance(table, Tensor) or table.dtype != torch.int32:
            kind = table.dtype if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"{name} must be an int32 tensor, got {kind}")
        check_dense(name, table)
        if table.dim() != 1 or table.shape[0] < 1:
            raise ValueError(f"{name} must have shape (sequences + 1,), got {tuple(table.shape)}")
        if table.device != q.device:
            raise TypeError(f"q and {name} are on different devices: {q.device}, {table.device}")
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0] - 1} sequences, cu_seqlens_k {cu_seqlens_k.shape[0] - 1}"
        )
    if q.shape[0] != 1:
        raise ValueError(f"with cu_seqlens_q all sequences lie in one item, (1, H, total, D), got B = {q.shape[0]}")


def resolve_softcap(softcap: float | None) -> float | None:
    """The cap of the scores, above 0; None for none. Any real number, whatever its spelling."""
    return None if softcap is None else capped(arguments.real("softcap", softcap))


def resolve_order(order: str) -> str:
    """One of ``analysis.algorithms.ORDERS``. TypeError for no string, ValueError for another."""
    if not isinstance(order, str):
        raise TypeError(f"order must be a string, got {type(order).__name__}")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    return order


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale: the caller's, or 1/sqrt(D) with the caller's own D, never a padded one.

    Any real number is taken, whatever its spelling (Python int or float, NumPy scalar).
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = arguments.real("scale", scale)
    if abs(value) > SCALE_MAX:
        raise ValueError(f"scale={value} is above {SCALE_MAX:.4g}: kernels compute in float32")
    return value
