"""Drivers of the ladder's last step: the Hopper kernels, what they cover, which form they take.

They cover fp16 and bf16, head_dim 64, 128 and, in the forward, 256, any lengths, grouped heads, a
backward that adds dq in a fixed order, and the options whose rows in ``analysis.features`` name this
family; not all of those together. The sm_80 kernels run the rest: ``unsupported_reason`` says why.

The forward comes exact and, in bf16 and only when asked for, optimistic: the row maximum is looked
for in the first key tiles alone, and what overflows for that is done again by the exact kernel.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from analysis.algorithms import Family
from analysis.arguments import checked
from analysis.features import FEATURES
from analysis.l2.attention import hopper_heads_per_group
from analysis.shapes import AttentionShape, Tile
from kernels import hopper_packed
from kernels.checks import check_shapes, finite
from kernels.hopper_forms import (
    BACKWARD_FORMS,
    FORWARD_FORMS,
    HEAD_DIMS,
    MASKS_AND_SCORES,
    PACKED_FORMS,
    REPAIR_TILES,
    WARPGROUP,
    BackwardForm,
    ForwardForm,
    backward_form,
    form_for,
    form_of_tile,
    forward_form,
    packed_form,
)
from kernels.launch import Argument, Array, Backend, IoType, Kernel, Pass, Size, TensorMap
from kernels.options import Options
from kernels.window import window_arguments

__all__ = [
    "BACKWARD_FORMS",
    "FORMS",
    "FORWARD_FORMS",
    "HEAD_DIMS",
    "MASKS_AND_SCORES",
    "PACKED_FORMS",
    "BackwardForm",
    "ForwardForm",
    "backward",
    "backward_form",
    "default_tile",
    "form_for",
    "form_of_tile",
    "forward",
    "forward_form",
    "packed_form",
    "unsupported_reason",
]

ALGORITHM = "flash-sm90"
#: The backward that adds dq in a fixed order; the forward is the same.
DETERMINISTIC = "flash-sm90-deterministic"
#: The forward with a stale reference maximum and a repair, bf16 only; the backward is the same.
OPTIMISTIC = "flash-sm90-optimistic"
#: Forms by name, whatever the rules would choose for a shape.
FORMS: dict[str, ForwardForm | BackwardForm] = {
    **{f"{ALGORITHM} {form.name}": form for form in FORWARD_FORMS},
    **{f"{ALGORITHM} {form.name}": form for form in BACKWARD_FORMS},
}


@checked
def unsupported_reason(
    dtype: IoType,
    head_dim: Size,
    features: Collection[str] = (),
    *,
    scale: float = 1.0,
    pass_: Pass = "forward",
    keys: Size = 1,
) -> str | None:
    """The first reason why the Hopper kernels do not cover a pass of a problem, or None.

    features: names of ``analysis.features``. keys: how many there are; the sequences may be empty
    elsewhere.
    """
    if dtype not in ("fp16", "bf16"):
        return f"dtype {dtype} (tensor cores take fp16 and bf16)"
    covered = HEAD_DIMS[pass_]
    if head_dim not in covered:
        return f"head_dim {head_dim} (the {pass_} covers {', '.join(map(str, covered))})"
    if not scale > 0:
        return f"scale {scale} (it must be positive)"
    if keys < 1:
        return "a sequence without rows"
    for name, each in FEATURES.items():
        if name in features and Family.HOPPER not in each.families:
            return each.title
    changes = [name for name in MASKS_AND_SCORES if name in features]
    if "packed" in features and head_dim == 256:
        return "packed sequences of head_dim 256 (no persistent form)"
    if "packed" in features and changes:
        *others, last = (FEATURES[name].title for name in MASKS_AND_SCORES)
        return f"packed sequences with {', '.join(others)} or {last}"
    if pass_ == "forward" or backward_form(head_dim, True, featured=True).takes(dtype, changes):
        return None
    asked = " and ".join(each.title for name, each in FEATURES.items() if name in changes)
    return f"{asked} in {dtype} at head_dim {head_dim} (the backward would spill registers)"


@checked
def default_tile(head_dim: int, pass_: str, causal: bool, seqlen_q: Size, *, featured: bool = False) -> Tile:
    """The tile that a pass runs with when none is asked for; ``featured``: :func:`forward_form`."""
    if pass_ not in ("forward", "backward"):
        raise ValueError(f"pass_={pass_!r} is neither 'forward' nor 'backward'")
    if head_dim not in HEAD_DIMS[pass_]:
        raise ValueError(f"the Hopper {pass_} covers head_dim {HEAD_DIMS[pass_]}, not {head_dim}")
    if pass_ == "backward":
        return backward_form(head_dim, causal, featured=featured).tile
    return forward_form(head_dim, causal, seqlen_q, featured=featured).tile


@checked
def forward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    form: ForwardForm | None = None,
    optimistic: bool = False,
    pdl: bool = False,
    **asked: Any,
) -> None:
    """out = softmax(scale · q kᵀ) v and lse. Arrays as in ``kernels.attention``.

    form: of the caller's choice; default :func:`forward_form`.
    optimistic: look for the row maximum in the first tiles only, and do again, exactly, the tiles
        where that was not enough; bf16.
    pdl: launch a persistent form so that it starts while the kernel that clears its counter is
        still running, and waits inside for that (programmatic dependent launch).

    asked: the fields of :class:`kernels.options.Options`, ``scale`` at least. With a window, a cap
        or ALiBi: one block a query tile, not optimistic. "sawtooth" walks the keys upwards in every
        second ``wave`` of blocks, by default as many as there are multiprocessors; with one block a
        query tile, and not optimistic. Packed sequences: by a form of :func:`packed_form`, alone.
        TMA sees them as ``launch.TensorMap`` says.

    Raises ValueError with the reason when the problem is not covered, and for arrays that do not
    fit together.
    """
    check_shapes(q, k, v, {"out": out}, {}, {"lse": lse}, None)
    options = Options(**asked)
    features = _features(options, q, k, keys=k.shape[2], optimistic=optimistic)
    scale, causal, packed = finite(options.scale), options.causal, options.packed
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    sawtooth, tile, stream = "sawtooth" in features, options.tile, options.stream
    if packed is not None:
        form = form or packed_form(head_dim, tile)
        hopper_packed.forward(backend, q, k, v, out, lse, packed, form, scale, causal, stream, pdl)
        return
    if form is None or tile is not None:
        form = forward_form(head_dim, causal, seqlen_q, tile, sawtooth=sawtooth, featured=bool(features - {"sawtooth"}))
    if form.head_dim != head_dim:
        raise ValueError(f"form for head_dim {form.head_dim}, arrays with {head_dim}")
    part = "optimistic" if optimistic else ""
    main = form.kernel(q.dtype, causal, part, features=features)
    if q.size == 0:
        return
    if optimistic and q.dtype != "bf16":
        raise ValueError(f"the optimistic softmax needs the exponents of bf16, not {q.dtype}")
    query_tiles = batch * heads * -(-seqlen_q // form.tile.block_m)
    args: list[Argument] = [
        TensorMap(q.with_access("r", "q"), 64),
        TensorMap(k.with_access("r", "k"), form.block_n),
        TensorMap(v.with_access("r", "v"), form.block_n),
        TensorMap(out.with_access("w", "out"), 64),
        lse.with_access("w", "lse"),
        np.int32(batch),
        np.int32(heads),
        np.int32(heads // kv_heads),
        np.int32(seqlen_q),
        np.int32(seqlen_k),
        np.float32(scale),
        np.int32(hopper_heads_per_group(_shape(q, k, causal), "forward")),
        *options.changes.arguments(scale),
    ]
    tile_counter: list[Array] = []
    grid = (query_tiles, 1, 1)
    if form.persistent:
        counter = backend.empty("tile_counter", (1,), "int32")
        reset = form.kernel(q.dtype, causal, "clear_counter")
        backend.launch(reset, (1, 1, 1), 0, [counter.with_access("w")], stream)
        tile_counter = [counter.with_access("atomic")]
        grid = (min(query_tiles, backend.multiprocessors), 1, 1)
    if not optimistic:
        waves = [np.int32(options.wave or backend.multiprocessors)] if sawtooth else []
        shared_bytes = form.bytes_of(alibi="alibi" in features)
        backend.launch(
            main,
            grid,
            shared_bytes,
            [*args, *tile_counter, *waves, *window_arguments(options.hidden(q, k))],
            stream,
            pdl=pdl and form.persistent,
        )
        return
    flags = backend.empty("flags", (query_tiles * 4 * form.consumers,), "int32")
    outputs = [*tile_counter, flags.with_access("w")]
    backend.launch(main, grid, form.shared_bytes, [*args, *outputs], stream)
    # The repair writes flagged tiles only. Its blocks look for them.
    args[3] = TensorMap(out.with_access("rw", "out"), 64)
    args[4] = lse.with_access("rw", "lse")
    second = form.kernel(q.dtype, causal, "repair")
    blocks = max(min(query_tiles, backend.multiprocessors), -(-query_tiles // REPAIR_TILES))
    backend.launch(second, (blocks, 1, 1), form.repair_shared_bytes, [*args, flags.with_access("r")], stream)


@checked
def backward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    *,
    form: BackwardForm | None = None,
    dlse: Array | None = None,
    deterministic: bool = False,
    pdl: bool = False,
    **asked: Any,
) -> None:
    """dq, dk, dv from dout and, if given, dlse, the gradient of lse.

    form: of the caller's choice; default :func:`backward_form`.
    deterministic: add dq up in a fixed order, so that it is the same bit for bit in every run.
    pdl: launch the second and the third kernel so that they start while the one before is still
        running, and wait inside for what it writes (programmatic dependent launch).

    asked: the fields of :class:`kernels.options.Options`, ``scale`` at least. At head_dim 64 a cap in
        bf16 alone, beside nothing else. "sawtooth" walks the queries downwards in every second
        ``wave`` of blocks, as in the forward; not with ``deterministic``, for which a wave would
        wait for the one before.

    Raises ValueError with the reason when the problem is not covered, and for arrays that do not
    fit together.
    """
    like_q = {"out": out, "dout": dout, "dq": dq}
    rows = {"lse": lse} | ({} if dlse is None else {"dlse": dlse})
    check_shapes(q, k, v, like_q, {"dk": dk, "dv": dv}, rows, None)
    options = Options(**asked)
    features = _features(options, q, k, keys=min(k.shape[2], q.shape[2]), pass_="backward")
    scale, causal, packed, stream = finite(options.scale), options.causal, options.packed, options.stream
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    featured = bool(features - {"sawtooth"}) or packed is not None
    form = form or backward_form(head_dim, causal, options.tile, featured=featured)
    if packed is not None:
        hopper_packed.backward(
            backend,
            q,
            k,
            v,
            out,
            dout,
            lse,
            dq,
            dk,
            dv,
            packed,
            form,
            scale=scale,
            causal=causal,
            dlse=dlse,
            deterministic=deterministic,
            stream=stream,
            pdl=pdl,
        )
        return
    if form.head_dim != head_dim:
        raise ValueError(f"form for head_dim {form.head_dim}, arrays with {head_dim}")
    if q.size == 0:
        return
    block_m, block_n = form.tile.block_m, form.tile.block_n
    query_tiles = -(-seqlen_q // block_m)
    padded_rows = batch * heads * query_tiles * block_m
    sawtooth = "sawtooth" in features

    def kernel(part: str) -> Kernel:
        return form.kernel(part, q.dtype, causal, deterministic=deterministic, dlse=dlse is not None, features=features)

    lse2 = backend.empty("lse2", (padded_rows,), "fp32")
    delta = backend.empty("delta", (padded_rows,), "fp32")
    dq_accum = backend.empty("dq_accum", (padded_rows * head_dim,), "fp32")
    turns = []
    if deterministic:
        turns = [backend.empty("turns", (batch * heads * query_tiles,), "int32")]
    rows_a_block = WARPGROUP // (head_dim // 8)
    backend.launch(
        kernel("preprocess"),
        (padded_rows // rows_a_block, 1, 1),
        0,
        [
            out.with_access("r", "out"),
            dout.with_access("r", "dout"),
            lse.with_access("r", "lse"),
            lse2.with_access("w"),
            delta.with_access("w"),
            dq_accum.with_access("w"),
            np.int32(heads),
            np.int32(seqlen_q),
            *([] if dlse is None else [dlse.with_access("r", "dlse")]),
            *(array.with_access("w") for array in turns),
        ],
        stream,
    )
    backend.launch(
        kernel(""),
        (batch * kv_heads * -(-seqlen_k // block_n), 1, 1),
        form.bytes_of(alibi="alibi" in features),
        [
            TensorMap(q.with_access("r", "q"), block_m),
            TensorMap(k.with_access("r", "k"), block_n),
            TensorMap(v.with_access("r", "v"), block_n),
            TensorMap(dout.with_access("r", "dout"), block_m),
            TensorMap(dk.with_access("w", "dk"), 64),
            TensorMap(dv.with_access("w", "dv"), 64),
            lse2.with_access("r"),
            delta.with_access("r"),
            dq_accum.with_access("atomic"),
            np.int32(batch),
            np.int32(kv_heads),
            np.int32(heads // kv_heads),
            np.int32(seqlen_q),
            np.int32(seqlen_k),
            np.float32(scale),
            np.float32(scale) * np.float32(math.log2(math.e)),
            np.int32(hopper_heads_per_group(_shape(q, k, causal), "backward")),
            *options.changes.arguments(scale),
            *(array.with_access("atomic") for array in turns),
            *([np.int32(options.wave or backend.multiprocessors)] if sawtooth else []),
            *window_arguments(options.hidden(q, k)),
        ],
        stream,
        pdl=pdl,
    )
    backend.launch(
        kernel("postprocess"),
        (batch * heads * query_tiles, 1, 1),
        form.post_shared_bytes,
        [dq_accum.with_access("r"), dq.with_access("w", "dq"), np.int32(heads), np.int32(seqlen_q), np.float32(scale)],
        stream,
        pdl=pdl,
    )


def _shape(q: Array, k: Array, causal: bool) -> AttentionShape:
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    return AttentionShape(batch, heads, seqlen_q, seqlen_k, head_dim, kv_heads, q.dtype, causal)


def _features(options: Options, q: Array, k: Array, *, keys: int, pass_: str = "forward", **alone: Any) -> set[str]:
    """Options beside a causal mask and packed sequences. ValueError for what is not covered.

    alone: of the caller's, that do not go with packed sequences either.
    """
    used = set(options.features(q, k)) - {"causal", "packed"}
    sawtooth = used & {"sawtooth"}
    if options.packed is not None:
        named = {each.argument: True for name, each in FEATURES.items() if name in used - sawtooth}
        options.packed.refuse(order=options.order, **alone, **named)
    options.changes.check(q, k)
    reason = unsupported_reason(
        q.dtype, q.shape[3], used - sawtooth, scale=finite(options.scale), pass_=pass_, keys=keys
    )
    if reason is not None:
        raise ValueError(f"the Hopper kernels do not cover {reason}")
    return used
