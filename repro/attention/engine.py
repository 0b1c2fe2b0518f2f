"""The way of q from ``repro.flash_attention`` to the first instruction of a kernel.

1. ``flash_attention`` casts under autocast, checks the arguments (``check_arguments``) and calls
   the operator ``repro::flash_attention``, through torch's dispatcher where a mode, a
   transformation, a profiler or a tensor subclass wants to see it and past it otherwise.
2. Where a gradient is wanted, an autograd function saves q for the backward pass; then ``forward``
   below looks for the recorded launches of an earlier call with equal shapes, strides, types and
   options, and on a cache hit goes on with step 5 (calls with a mask, a seed or a copied tensor
   are not cached).
3. On a miss ``readable`` makes q an ``Array`` (address, shape, strides), by way of a padded copy
   where 16-byte loads cannot read it in place.
4. ``record`` runs the driver once on arrays without memory: ``choose`` picks the algorithm for the
   device, the shape and the options, ``kernels.attention`` its tile and compiled form, and the
   launches it asks for are the plan.
5. ``replay`` puts the address of q into the plan's arguments, and the backend compiles the source
   (NVRTC for a GPU, the C++ compiler for the host; once, then from a cache) and launches it: on
   torch's current stream, or thread block by thread block on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.packed import Lengths
from analysis.problem import GRADIENTS, Problem
from analysis.shapes import AttentionShape, Tile, aligned_head_dim
from analysis.window import Sides
from kernels import dispatch, launches
from kernels.flash_config import SHARED_LIMIT_BYTES
from kernels.launch import Array, Backend
from kernels.launching.plan import record, replay
from kernels.window import hides
from repro.attention import launcher
from repro.attention.packed import lengths_of
from repro.attention.validation import DTYPES
from repro.attention.views import ALIGNMENT_BYTES, Views, array_of

__all__ = [
    "KeptForward",
    "Options",
    "backward",
    "check_tile",
    "forget",
    "forward",
    "kept",
    "shared_limit",
]

#: Recorded calls by layouts and options, and the forward calls among them by q, k, v alone.
#: Emptied when they reach the limit.
_REPEATED: dict[Hashable, launcher.Repeated] = {}
_KEPT: dict[Hashable, KeptForward] = {}
_REPEATED_LIMIT = 4096
#: Stands for a block mask, whose bits the kernels alone look at.
SOME_BLOCKS = np.ones((1, 1, 1, 1), np.bool_)


class Options(NamedTuple):
    """What shapes the computation beside q, k and v; the operator's schema in the same order."""

    key_mask: Tensor | None
    block_mask: Tensor | None
    seed: Tensor | None
    causal: bool
    scale: float
    dropout_p: float
    tile: Sequence[int] | None
    deterministic: bool
    order: str
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    left: int | None = None
    right: int | None = None
    sinks: int = 0
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    scale_block: int | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def window(self) -> Sides:
        return self.left, self.right

    @property
    def fp8(self) -> bool:
        """Whether k and v are e4m3; then there are scales, and no backward."""
        return self.k_scale is not None

    @property
    def plain(self) -> bool:
        """No tile, dropout, order, window, change of the scores, scales or packed sequences."""
        changes = (self.softcap, self.alibi_slopes, self.bias, self.k_scale, self.cu_seqlens_q)
        asked = (self.tile, self.dropout_p or None, *changes, *self.window)
        return all(option is None for option in asked) and self.order == "rows"


class KeptForward:
    """A recorded forward: replayed without any check, as equal layouts and options passed them."""

    def __init__(self, call: launcher.Repeated, rows: torch.Size) -> None:
        self._call = call
        self._rows = rows

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = torch.empty(self._rows, dtype=torch.float32, device=self._call.device)
        addresses = [t.data_ptr() for t in (q, k, v, out, lse)]
        if _aligned(addresses):
            self._call(addresses)
        else:
            forward(q, k, v, out, lse, Options(*options))
        return out, lse


def kept(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, deterministic: bool
) -> KeptForward | None:
    """The recorded forward of plain tensors without mask, dropout, tile, order, window; None on a
    miss."""
    return _KEPT.get(_kept_key(q, k, v, causal, scale, deterministic))


def _kept_key(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, deterministic: bool
) -> Hashable:
    return (
        launcher.backend_of(q.device), causal, scale, deterministic,
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
    )  # fmt: skip


def forget() -> None:
    """Empty the cache of recorded calls."""
    _REPEATED.clear()
    _KEPT.clear()


def check_tile(q: Tensor, options: Options, limit: int = SHARED_LIMIT_BYTES) -> None:
    """Raise ``ValueError`` with both numbers if the tile asked for does not fit some kernel.

    limit: shared memory a block may have; by default what no device exceeds.
    """
    if options.tile is None:
        return
    problem = problem_of((1, 1, 1, 1, 1), q, options)  # sizes decide nothing, and may be symbols
    for pass_ in ("forward",) if options.fp8 else ("forward", "backward"):
        dispatch.kernel_tile(pass_, problem, limit)


def problem_of(
    sizes: Sequence[int],
    q: Tensor,
    options: Options,
    lengths: Lengths | None = None,
    **gradients: Any,
) -> Problem:
    """The problem of a call, as its kernels see it.

    sizes: batch, heads, key/value heads, queries, keys. gradients: fields of a backward.
    """
    batch, heads, kv_heads, seqlen_q, seqlen_k = sizes
    columns = aligned_head_dim(int(q.shape[3]))
    shape = AttentionShape(
        batch, heads, seqlen_q, seqlen_k, columns, kv_heads, DTYPES[q.dtype], options.causal,
        options.window, options.sinks, options.fp8, options.scale_block,
    )  # fmt: skip
    bias = options.bias
    return Problem(
        shape, lengths, options.scale, options.key_mask is not None,
        None if options.block_mask is None else SOME_BLOCKS, options.dropout_p, options.softcap,
        options.alibi_slopes is not None,
        None if bias is None else (int(bias.shape[0]), int(bias.shape[1])),
        tile=None if options.tile is None else Tile(*options.tile), order=options.order,
        deterministic=options.deterministic, **gradients,
    )  # fmt: skip


def shared_limit(device: torch.device) -> int:
    """Shared memory that a block may have on a device."""
    found = getattr(launcher.backend_of(device), "shared_limit_bytes", None)
    return SHARED_LIMIT_BYTES if found is None else int(found)


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options) -> None:
    """Fill ``out`` and ``lse``."""
    lengths = _lengths(q, k, options)
    if q.numel() == 0 or k.numel() == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    if options.fp8:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    call = _launch("forward", tensors, options, lengths)
    if call is not None and options.plain:
        taken = (options.causal, options.scale, options.deterministic)
        _KEPT[_kept_key(q, k, v, *taken)] = KeptForward(call, lse.shape)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: Sequence[Tensor],
    options: Options,
    needed: Sequence[bool],
) -> None:
    """Fill those of ``grads`` = (dq, dk, dv, dbias) that are ``needed``."""
    lengths = _lengths(q, k, options)
    if q.numel() == 0 or k.numel() == 0:
        for grad in grads:
            grad.zero_()
        return
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    if dlse is not None:
        tensors["dlse"] = dlse
    # Gradients are made together: one that nobody asked for goes to scratch.
    need_bias = needed[3]
    need_dq, need_kv = needed[0] or need_bias, needed[1] or needed[2] or need_bias
    for name, wanted, asked, grad, like in zip(
        GRADIENTS, (need_dq, need_kv, need_kv), needed, grads, (q, k, v), strict=False
    ):
        if wanted:
            tensors[name] = grad if asked else like.new_empty(like.shape)
    if need_bias:
        tensors["dbias"] = grads[3]
    _launch("backward", tensors, options, lengths)


def _launch(
    pass_: str, tensors: dict[str, Tensor], options: Options, lengths: Lengths | None
) -> launcher.Repeated | None:
    """Run a pass on its tensors and those of the options; what was recorded if it was recorded now
    and can be repeated."""
    q, k = tensors["q"], tensors["k"]
    tensors |= _changes(q, options) | _scales(k, options) | _tables(options)
    key = _key(pass_, tensors, options, lengths)
    if _run_again(key, tensors):
        return None
    gradients: dict[str, Any] = {}
    if pass_ == "backward":
        gradients = {
            "gradients": [name for name in GRADIENTS if name in tensors],
            "bias_gradient": "dbias" in tensors,
            "lse_gradient": "dlse" in tensors,
        }
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2])
    problem = problem_of(sizes, q, options, lengths, **gradients)
    more: dict[str, Any] = {"shared_limit_bytes": shared_limit(q.device)}
    more["tile"] = dispatch.kernel_tile(pass_, problem, more["shared_limit_bytes"])
    if options.seed is not None:
        more["seed"] = int(options.seed)

    def driver(backend: Backend, at: dict[str, Array]) -> None:
        algorithm, _ = launches.choose(backend, at, problem, pass_)
        launches.run(backend, algorithm, at, problem, pass_, **more)

    with ExitStack() as results:
        views = Views()
        arrays = {n: _array(pass_, n, x, views, results) for n, x in tensors.items()}
        call = _run(driver, tensors, arrays | _masks(q, options, views), key)
    launcher.note_copies(q.device, views.copied)
    return call


#: What a pass writes.
_RESULTS = {"forward": ("out", "lse"), "backward": (*GRADIENTS, "dbias")}


def _array(pass_: str, name: str, tensor: Tensor, views: Views, results: ExitStack) -> Array:
    """A tensor as kernels take it, by way of a copy where they cannot."""
    if name in _RESULTS[pass_]:
        if name in ("out", *GRADIENTS):
            tensor = results.enter_context(views.written(name, tensor))
        return array_of(name, tensor)
    if name in ("q", "k", "v", "out", "dout"):
        return views.readable(name, tensor)
    if name in launches.OPTIONAL:
        return views.pairs(name, tensor)
    return views.dense(name, tensor)


def _key(
    pass_: str, tensors: Mapping[str, Tensor], options: Options, lengths: Lengths | None
) -> Hashable:
    """The cache key of a call; None for calls with a mask or a seed, which are not cached.

    Of packed sequences the launches depend on the longest and on whether a window hides anything
    in any of them.
    """
    if options.key_mask is not None or options.block_mask is not None or options.seed is not None:
        return None
    key: list[Any] = [
        pass_,
        launcher.backend_of(tensors["q"].device),
        *tensors,
        options.causal,
        options.scale,
        options.dropout_p,
        None if options.tile is None else tuple(options.tile),
        options.deterministic,
        options.order,
        options.softcap,
        options.window,
        options.sinks,
        options.scale_block,
    ]
    if lengths is not None:
        windowed = _windowed(tensors["q"].shape, tensors["k"].shape, options, lengths)
        key += (lengths.longest_q, lengths.longest_k, windowed)
    for tensor in tensors.values():
        key += (tensor.shape, tensor.stride(), tensor.dtype)
    return tuple(key)


def _run_again(key: Hashable, tensors: Mapping[str, Tensor]) -> bool:
    """Replay the recorded call with this key; False on a cache miss."""
    call = None if key is None else _REPEATED.get(key)
    if call is None:
        return False
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    if not _aligned(addresses):
        return False
    call(addresses)
    return True


def _aligned(addresses: Sequence[int]) -> bool:
    return not any(address % ALIGNMENT_BYTES for address in addresses)


def _run(
    driver: Callable[[Backend, dict[str, Array]], None],
    tensors: Mapping[str, Tensor],
    arrays: Mapping[str, Array],
    key: Hashable,
) -> launcher.Repeated | None:
    """Record what the driver launches, run it, and cache it unless a tensor had to be copied."""
    device = tensors["q"].device
    with launcher.launcher_for(device) as backend:
        plan = record(backend, arrays, driver)
        addresses = [array.pointer for array in arrays.values()]
        replay(plan, backend, addresses, launcher.stream_of(device))
    in_place = all(arrays[name].pointer == tensor.data_ptr() for name, tensor in tensors.items())
    if key is None or not in_place:
        return None
    if len(_REPEATED) >= _REPEATED_LIMIT:
        forget()
    call = _REPEATED[key] = launcher.Repeated(plan, device)
    return call


def _windowed(
    q: Sequence[int], k: Sequence[int], options: Options, lengths: Lengths | None
) -> bool:
    """Whether the window hides anything, so that kernels must know of it. q, k: their shapes."""
    sizes = [(q[2], k[2])] if lengths is None else lengths.pairs
    return hides(sizes, options.causal, options.window, options.sinks)


def _lengths(q: Tensor, k: Tensor, options: Options) -> Lengths | None:
    """Of packed sequences, read from the tables and checked; None for a plain batch."""
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        return None
    return lengths_of(q, k, options.cu_seqlens_q, options.cu_seqlens_k)


def _tables(options: Options) -> dict[str, Tensor]:
    tables = {"cu_seqlens_q": options.cu_seqlens_q, "cu_seqlens_k": options.cu_seqlens_k}
    return {name: table for name, table in tables.items() if table is not None}


def _changes(q: Tensor, options: Options) -> dict[str, Tensor]:
    """Tensors that change scores, in the dimensions that kernels take."""
    changes = {}
    if options.alibi_slopes is not None:
        table = options.cu_seqlens_q
        items = q.shape[0] if table is None else table.shape[0] - 1
        changes["alibi_slopes"] = options.alibi_slopes.expand(items, q.shape[1])[..., None]
    if options.bias is not None:
        changes["bias"] = options.bias
    return changes


def _scales(k: Tensor, options: Options) -> dict[str, Tensor]:
    """Scales of e4m3 keys and values as (B, Hkv, blocks of keys)."""
    if options.k_scale is None or options.v_scale is None:
        return {}
    named = {"k_scale": options.k_scale, "v_scale": options.v_scale}
    if options.scale_block is not None:
        return named
    return {name: scale[None, :, None].expand(*k.shape[:2], 1) for name, scale in named.items()}


def _masks(q: Tensor, options: Options, views: Views) -> dict[str, Array]:
    masks: dict[str, Array] = {}
    if options.key_mask is not None:
        masks["key_mask"] = views.dense("key_mask", options.key_mask.view(torch.uint8))
    if options.block_mask is not None:
        mask = views.contiguous("block_mask", options.block_mask.view(torch.uint8))
        mask = mask.expand(*q.shape[:2], *mask.shape[-2:])
        masks["block_mask"] = array_of("block_mask", mask)
    return masks
