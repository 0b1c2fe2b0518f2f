"""The way of q from ``repro.flash_attention`` to the first instruction of a kernel.

1. ``flash_attention`` casts under autocast, checks the arguments (``check_arguments``) and calls
   the operator ``repro::flash_attention``, through torch's dispatcher where a mode, a
   transformation, a profiler or a tensor subclass wants to see it and past it otherwise.
2. Where a gradient is wanted, an autograd function saves q for the backward pass; then ``forward``
   below looks for the recorded launches of an earlier call with equal shapes, strides, types and
   options, and on a cache hit goes on with step 5 (calls with a mask, a seed or a copied tensor
   are not cached). Where nothing but these decides, ``flash_attention`` looks before it checks.
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

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.features import FEATURES
from analysis.packed import Lengths
from analysis.problem import GRADIENTS, Problem
from analysis.shapes import AttentionShape, Tile, aligned_head_dim
from kernels import dispatch, launches
from kernels.flash_config import SHARED_LIMIT_BYTES
from kernels.launch import Array, Backend
from kernels.launching.plan import record, replay
from kernels.window import hides
from repro.attention import launcher
from repro.attention.options import DIFFERENTIABLE, VALUES, Options
from repro.attention.packed import lengths_of
from repro.attention.validation import DTYPES, resolve_scale
from repro.attention.views import ALIGNMENT_BYTES, Views, array_of

__all__ = ["again", "backward", "check_tile", "first", "forget", "forward", "recorded", "repeat", "shared_limit"]

#: Recorded calls, those of decoding too, by layouts and options. Emptied when they reach the limit.
_REPEATED: dict[Hashable, launcher.Repeated] = {}
_REPEATED_LIMIT = 4096
#: What a pass writes; and all tensors of a forward, in their order.
_RESULTS = {"forward": ("out", "lse"), "backward": (*GRADIENTS, *(f"d{name}" for name in DIFFERENTIABLE))}
_FORWARD = ("q", "k", "v", "out", "lse")
#: Stands for a block mask, whose bits the kernels alone look at.
SOME_BLOCKS = np.ones((1, 1, 1, 1), np.bool_)


def recorded(tensors: Sequence[Tensor], options: Options) -> launcher.Repeated | None:
    """The recorded forward of a call on q, k, v and the options' tensors that nobody has checked
    yet: equal layouts and values passed the checks before. None on a miss."""
    given = () if len(tensors) == 3 else _tensors(options)
    return _REPEATED.get(_key("forward", tensors[:3], options, given, _FORWARD))


def repeat(call: launcher.Repeated, tensors: Sequence[Tensor], options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) of a recorded forward on q, k, v and the options' tensors."""
    q, k, v, *given = tensors
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    addresses = [each.data_ptr() for each in (q, k, v, out, lse, *given)]
    if _aligned(addresses):
        call(addresses)
    else:
        forward(q, k, v, out, lse, options)
    return out, lse


def forget() -> None:
    """Empty the cache of recorded calls."""
    _REPEATED.clear()


def check_tile(q: Tensor, options: Options, limit: int = SHARED_LIMIT_BYTES) -> None:
    """Raise ``ValueError`` with both numbers if the tile asked for does not fit some kernel.

    limit: shared memory a block may have; by default what no device exceeds.
    """
    if options.tile is None:
        return
    # Sizes decide nothing, those of a bias neither, and may be symbols.
    if options.bias is not None:
        options = options._replace(bias=q.new_empty((1, 1, 1, 1)))
    problem = problem_of((1, 1, 1, 1, 1), q, options)
    for pass_ in ("forward",) if options.fp8 else ("forward", "backward"):
        dispatch.kernel_tile(pass_, problem, limit)


def problem_of(
    sizes: Sequence[int], q: Tensor, options: Options, lengths: Lengths | None = None, **gradients: Any
) -> Problem:
    """The problem of a call, as its kernels see it.

    sizes: batch, heads, key/value heads, queries, keys. gradients: fields of a backward.
    """
    batch, heads, kv_heads, seqlen_q, seqlen_k = sizes
    columns = aligned_head_dim(int(q.shape[3]))
    shape = AttentionShape(
        batch,
        heads,
        seqlen_q,
        seqlen_k,
        columns,
        kv_heads,
        DTYPES[q.dtype],
        options.causal,
        options.window,
        options.sinks,
        options.fp8,
        options.scale_block,
    )
    bias = options.bias
    scale = resolve_scale(options.scale, int(q.shape[3]))
    return Problem(
        shape,
        lengths,
        scale,
        options.key_mask is not None,
        None if options.block_mask is None else SOME_BLOCKS,
        options.dropout_p,
        options.softcap,
        options.alibi_slopes is not None,
        None if bias is None else (int(bias.shape[0]), int(bias.shape[1])),
        tile=None if options.tile is None else Tile(*options.tile),
        order=options.order,
        deterministic=options.deterministic,
        sink_logits=options.sink_logits is not None,
        **gradients,
    )


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
        if options.sink_logits is not None:
            lse.copy_(options.sink_logits[:, None].expand(lse.shape))
        return
    if options.fp8:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    _launch("forward", {"q": q, "k": k, "v": v, "out": out, "lse": lse}, options, lengths)


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
    """Fill those of ``grads``, of q, k, v and ``DIFFERENTIABLE`` options, that are ``needed``."""
    lengths = _lengths(q, k, options)
    if q.numel() == 0 or k.numel() == 0:
        for grad in grads:
            grad.zero_()
        if dlse is not None and options.sink_logits is not None and needed[4]:
            grads[4].copy_(dlse.sum((0, 2)))  # lse is the logit
        return
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    if dlse is not None:
        tensors["dlse"] = dlse
    # Gradients are made together: one that nobody asked for goes to scratch.
    own = {f"d{name}": grad for name, grad, asked in zip(DIFFERENTIABLE, grads[3:], needed[3:], strict=True) if asked}
    need_bias = "dbias" in own
    alone = bool(own) and not any(needed[:3])
    need_dq, need_kv = needed[0] or need_bias or alone, needed[1] or needed[2] or need_bias
    for name, wanted, asked, grad, like in zip(
        GRADIENTS, (need_dq, need_kv, need_kv), needed, grads, (q, k, v), strict=False
    ):
        if wanted:
            tensors[name] = grad if asked else like.new_empty(like.shape)
    _launch("backward", tensors | own, options, lengths)


def _launch(pass_: str, tensors: dict[str, Tensor], options: Options, lengths: Lengths | None) -> None:
    """Run a pass on its tensors and those of the options."""
    q, k = tensors["q"], tensors["k"]
    key = None
    if options.key_mask is None and options.block_mask is None and options.seed is None:
        if options.tile is not None:
            options = options._replace(tile=tuple(options.tile))
        read = [x for name, x in tensors.items() if name not in _RESULTS[pass_]]
        more = () if lengths is None else _of_lengths(options, lengths)
        key = _key(pass_, read, options, _tensors(options), tuple(tensors), more)
    tensors |= _changes(q, options) | _scales(k, options) | _tables(options)
    if key is not None and again(key, tensors.values()):
        return
    gradients: dict[str, Any] = {}
    if pass_ == "backward":
        of_backward = [each for each in FEATURES.values() if "forward" not in each.passes]
        gradients = {each.name: each.argument in tensors for each in of_backward}
        gradients["gradients"] = [name for name in GRADIENTS if name in tensors]
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2])
    problem = problem_of(sizes, q, options, lengths, **gradients)
    limit = shared_limit(q.device)
    tile = dispatch.kernel_tile(pass_, problem, limit)
    given: dict[str, Any] = {"shared_limit_bytes": limit, "tile": tile}
    if options.seed is not None:
        given["seed"] = int(options.seed)

    def driver(backend: Backend, at: dict[str, Array]) -> None:
        algorithm, _ = launches.choose(backend, at, problem, pass_)
        launches.run(backend, algorithm, at, problem, pass_, **given)

    with ExitStack() as results:
        views = Views()
        arrays = {n: _array(pass_, n, x, views, results) for n, x in tensors.items()}
        first(driver, tensors, arrays | _masks(q, options, views), key)
    launcher.note_copies(q.device, views.copied)


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
    pass_: str,
    read: Sequence[Tensor],
    options: Options,
    given: Sequence[tuple[str, Tensor]],
    named: Sequence[str],
    more: Any = (),
) -> Hashable:
    """The cache key of a call that reads these tensors; what it writes is laid out like them.

    given: the tensors among the options. named: all others, in their order. more: what else decides
    on the launches.
    """
    key: list[Any] = [pass_, launcher.backend_of(read[0].device), options[:VALUES], named, more]
    for each in read:
        key += (each.shape, each.stride(), each.dtype, each.device)
    for name, option in given:
        key += (name, option.shape, option.stride(), option.dtype, option.device)
    return tuple(key)


def _tensors(options: Options) -> list[tuple[str, Tensor]]:
    pairs = zip(Options._fields[VALUES:], options.tensors, strict=True)
    return [(name, each) for name, each in pairs if each is not None]


def _aligned(addresses: Sequence[int]) -> bool:
    return reduce(or_, addresses) % ALIGNMENT_BYTES == 0


def again(key: Hashable, tensors: Iterable[Tensor], rows: int | None = None) -> bool:
    """Replay the recorded call with this key on these tensors; False where there is none, or where
    kernels cannot read one of the first ``rows`` (all) in place."""
    call = _REPEATED.get(key)
    if call is None:
        return False
    addresses = [tensor.data_ptr() for tensor in tensors]
    if not _aligned(addresses[:rows]):
        return False
    call(addresses)
    return True


def first(
    driver: Callable[[Backend, dict[str, Array]], None],
    tensors: Mapping[str, Tensor],
    arrays: Mapping[str, Array],
    key: Hashable,
) -> None:
    """Record what the driver launches, run it, and cache it unless a tensor had to be copied."""
    device = tensors["q"].device
    with launcher.launcher_for(device) as backend:
        plan = record(backend, arrays, driver)
        addresses = [array.pointer for array in arrays.values()]
        replay(plan, backend, addresses, launcher.stream_of(device))
    in_place = all(arrays[name].pointer == tensor.data_ptr() for name, tensor in tensors.items())
    if key is None or not in_place:
        return
    if len(_REPEATED) >= _REPEATED_LIMIT:
        forget()
    _REPEATED[key] = launcher.Repeated(plan, device)


def _of_lengths(options: Options, lengths: Lengths) -> tuple[Any, ...]:
    """What the launches of packed sequences depend on: the longest, and whether a window hides
    anything in any of them."""
    windowed = hides(lengths.pairs, options.causal, options.window, options.sinks)
    return lengths.longest_q, lengths.longest_k, windowed


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
    learned = {name: getattr(options, name) for name in DIFFERENTIABLE}
    return changes | {name: tensor for name, tensor in learned.items() if tensor is not None}


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
