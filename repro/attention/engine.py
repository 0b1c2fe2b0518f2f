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

import torch
from torch import Tensor

from analysis.packed import Lengths
from analysis.shapes import Tile, aligned_head_dim
from analysis.window import Sides
from kernels import attention, dispatch
from kernels.launch import Array, Backend
from kernels.launching.plan import record, replay
from kernels.packed import Packed
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


def check_tile(q: Tensor, options: Options, limit: int = attention.SHARED_LIMIT_BYTES) -> None:
    """Raise ``ValueError`` with both numbers if the tile asked for does not fit some kernel.

    limit: shared memory a block may have; by default what no device exceeds.
    """
    for pass_ in ("forward",) if options.fp8 else ("forward", "backward"):
        _kernel_tile(pass_, q, options, limit)


def _kernel_tile(pass_: str, q: Tensor, options: Options, limit: int) -> Tile | None:
    """The tile a pass runs with: the caller's, or None for the kernels' own choice."""
    if options.tile is None:
        return None
    block = Tile(*options.tile)
    return dispatch.kernel_tile(
        pass_, DTYPES[q.dtype], aligned_head_dim(int(q.shape[3])), block, limit=limit,
        block_size=(block.block_m, block.block_n) if options.block_mask is not None else None,
        causal=options.causal, window=options.window != (None, None),
        key_mask=options.key_mask is not None, dropout=options.dropout_p > 0.0,
        softcap=options.softcap is not None, alibi=options.alibi_slopes is not None,
        bias=options.bias is not None, fp8=options.fp8,
        packed=options.cu_seqlens_q is not None,
    )  # fmt: skip


def shared_limit(device: torch.device) -> int:
    """Shared memory that a block may have on a device."""
    found = getattr(launcher.backend_of(device), "shared_limit_bytes", None)
    return attention.SHARED_LIMIT_BYTES if found is None else int(found)


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
    tensors |= _changes(q, options) | _scales(k, options) | _tables(options)
    key = _key("forward", tensors, options, lengths)
    if _run_again(key, tensors):
        return
    with ExitStack() as results:
        views = Views()
        arrays = {
            "q": views.readable("q", q),
            "k": views.readable("k", k),
            "v": views.readable("v", v),
            "out": array_of("out", results.enter_context(views.written("out", out))),
            "lse": array_of("lse", lse),
        }
        arrays |= {n: views.pairs(n, x) for n, x in _changes(q, options).items()}
        arrays |= {n: views.pairs(n, x) for n, x in _scales(k, options).items()}
        arrays |= {n: views.dense(n, x) for n, x in _tables(options).items()}

        def driver(backend: Backend, at: dict[str, Array]) -> None:
            operands = (at["q"], at["k"], at["v"], at["out"])
            attention.forward(
                backend,
                _choose("forward", backend, operands, options, lengths).algorithm,
                *operands,
                {"lse": at["lse"]},
                tile=_kernel_tile("forward", q, options, shared_limit(q.device)),
                k_scale=at.get("k_scale"),
                v_scale=at.get("v_scale"),
                scale_block=options.scale_block,
                **_features(q, options, at, lengths),
            )

        call = _run(driver, tensors, arrays | _masks(q, options, views), key)
    launcher.note_copies(q.device, views.copied)
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
    need_bias = needed[3]  # its gradient comes with the others, which then go to scratch
    need_dq, need_kv = needed[0] or need_bias, needed[1] or needed[2] or need_bias
    made = {"dq": need_dq, "dk": need_kv, "dv": need_kv}
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    if dlse is not None:
        tensors["dlse"] = dlse
    for (name, wanted), grad, like, asked in zip(
        made.items(), grads[:3], (q, k, v), needed[:3], strict=True
    ):
        # dk and dv come together: if only one is asked for, the other goes to scratch.
        if wanted:
            tensors[name] = grad if asked else like.new_empty(like.shape)
    if need_bias:
        tensors["dbias"] = grads[3]
    tensors |= _changes(q, options) | _tables(options)
    key = _key("backward", tensors, options, lengths)
    if _run_again(key, tensors):
        return
    with ExitStack() as results:
        views = Views()
        arrays = {
            "q": views.readable("q", q),
            "k": views.readable("k", k),
            "v": views.readable("v", v),
            "out": views.readable("out", out),
            "dout": views.readable("dout", dout),
            "lse": views.dense("lse", lse),
        }
        if dlse is not None:
            arrays["dlse"] = views.dense("dlse", dlse)
        for name, wanted in made.items():
            if wanted:
                memory = results.enter_context(views.written(name, tensors[name]))
                arrays[name] = array_of(name, memory)
        if need_bias:
            arrays["dbias"] = array_of("dbias", grads[3])
        arrays |= {n: views.pairs(n, x) for n, x in _changes(q, options).items()}
        arrays |= {n: views.dense(n, x) for n, x in _tables(options).items()}

        def driver(backend: Backend, at: dict[str, Array]) -> None:
            operands = (at["q"], at["k"], at["v"], at["out"], at["dout"])
            # A fused pass makes all three; where dq, or both dk and dv, are not wanted, neither
            # is it.
            algorithm = "flash-split"
            if all(made.values()):
                arrays = (*operands, at["dq"], at["dk"], at["dv"])
                algorithm = _choose("backward", backend, arrays, options, lengths).algorithm
            attention.backward(
                backend,
                algorithm,
                *operands,
                {"lse": at["lse"]},
                *(at.get(name) for name in made),
                tile=_kernel_tile("backward", q, options, shared_limit(q.device)),
                dlse=at.get("dlse"),
                dbias=at.get("dbias"),
                **_features(q, options, at, lengths),
            )

        _run(driver, tensors, arrays | _masks(q, options, views), key)
    launcher.note_copies(q.device, views.copied)


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


def _choose(
    pass_: str,
    backend: Backend,
    arrays: Sequence[Array],
    options: Options,
    lengths: Lengths | None,
) -> dispatch.Choice:
    """The kernels for a pass. The forward is deterministic whichever it is.

    Where Hopper's kernels do not run, of the two deterministic backwards the split one: at most as
    many bytes as the ordered workspace, and none of its memory, which grows with Nq · Nk (the price
    of determinism is a figure of its own).
    """
    return dispatch.choose(
        backend,
        arrays,
        scale=options.scale,
        pass_=pass_,
        tile=None if options.tile is None else Tile(*options.tile),
        key_mask=options.key_mask is not None,
        dropout=options.dropout_p > 0.0,
        block_mask=options.block_mask is not None,
        softcap=options.softcap is not None,
        alibi=options.alibi_slopes is not None,
        bias=options.bias is not None,
        window=_windowed(arrays[0].shape, arrays[1].shape, options, lengths),
        fp8=options.fp8,
        packed=lengths is not None,
        deterministic=options.deterministic and pass_ == "backward",
        causal=options.causal,
        order=options.order,
    )


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


def _features(
    q: Tensor, options: Options, arrays: Mapping[str, Array], lengths: Lengths | None
) -> dict[str, Any]:
    features: dict[str, Any] = {
        "scale": options.scale,
        "causal": options.causal,
        "window": options.window,
        "sinks": options.sinks,
        "dropout_p": options.dropout_p,
        "shared_limit_bytes": shared_limit(q.device),
        "order": options.order,
        "softcap": options.softcap,
        "alibi_slopes": arrays.get("alibi_slopes"),
        "bias": arrays.get("bias"),
    }
    if lengths is not None:
        tables = (arrays["cu_seqlens_q"], arrays["cu_seqlens_k"])
        features["packed"] = Packed(*tables, lengths)
    if options.seed is not None:
        features["seed"] = int(options.seed)
    if options.key_mask is not None:
        features["key_mask"] = arrays["key_mask"]
    if options.block_mask is not None:
        assert options.tile is not None
        features["block_mask"] = arrays["block_mask"]
        features["block_size"] = tuple(options.tile)
    return features


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
