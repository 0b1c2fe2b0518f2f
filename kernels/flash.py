"""The sm_80 flash kernels: which launches make a forward and a backward (step 3 of the ladder).

``kernels.attention`` checks what all algorithms have in common and calls these. Arrays as there.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from analysis.arguments import checked
from kernels.bias_gradient import BiasGradient
from kernels.checks import check_shapes, finite
from kernels.flash_config import FlashConfig
from kernels.launch import Argument, Array, Backend, Count, Kernel, Size
from kernels.options import Options, tiles
from kernels.scores import ScoreChanges, check_bias
from kernels.window import window_arguments


def forward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: Options,
    progress: Array | None = None,
    progress_tiles: int = 0,
) -> None:
    """out and lse. Raises TypeError or ValueError before anything is launched."""
    scales = options.key_scales
    kv_dtype = None if scales is None else "uint8"
    check_shapes(q, k, v, {"out": out}, {}, {"lse": lse}, options.key_mask, kv_dtype)
    if scales is not None:
        scales.check(q, k)
    options.check(q, k, progress=progress)
    scale = finite(options.scale)
    config = options.config(
        "forward", q, k, any_scale=scale <= 0.0, progress=progress_tiles if progress is not None else 0
    )
    heads, head_dim = q.shape[1], q.shape[3]
    items, seqlen_q, seqlen_k = options.sizes(q, k)
    blocks = items * heads * tiles(seqlen_q, config.tile.block_m)
    if progress is not None:
        _check_progress(progress, blocks, config, seqlen_k)
    if blocks == 0:
        return
    args: list[Argument] = [
        options.rows(q, "r", "q"),
        options.rows(k, "r", "k"),
        options.rows(v, "r", "v"),
        options.rows(out, "w", "out"),
        options.rows(lse, "w", "lse"),
        np.int32(heads),
        np.int32(heads // k.shape[1]),
        np.int32(seqlen_q),
        np.int32(seqlen_k),
        np.int32(head_dim),
        np.float32(scale),
        *([] if scales is None else scales.arguments(k)),
        *options.changes.arguments(scale),
        *([] if options.sink_logits is None else [options.sink_logits.with_access("r", "sink_logits")]),
        *options.masks(),
        *options.walk(backend, config, q, k),
    ]
    if progress is not None:
        args += [progress.with_access("rw", "progress"), np.int32(progress.shape[1])]
    backend.launch(config.kernel(), (blocks, 1, 1), config.shared_bytes, args, options.stream)


@checked
def progress_notes(seqlen_k: Size, block_n: Count, progress_tiles: Size) -> int:
    """Columns of ``progress``: SM, start, a note for every ``progress_tiles`` key tiles, end."""
    if progress_tiles < 1:
        raise ValueError(f"progress_tiles={progress_tiles} is below 1")
    return 3 + tiles(seqlen_k, block_n) // progress_tiles


def _check_progress(progress: Array, blocks: int, config: FlashConfig, seqlen_k: int) -> None:
    wanted = (blocks, progress_notes(seqlen_k, config.tile.block_n, config.progress))
    if progress.dtype != "int64" or progress.shape != wanted:
        raise ValueError(f"progress is {progress.dtype} {progress.shape}, not int64 {wanted} (blocks, notes)")


def backward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    dq: Array | None,
    dk: Array | None,
    dv: Array | None,
    options: Options,
    *,
    dlse: Array | None = None,
    dbias: Array | None = None,
    workspace: bool = False,
    split: bool = False,
) -> None:
    """The gradients, P recomputed from lse. Raises before anything is launched.

    workspace: partial dQ of every key tile, added up in their order, instead of atomic additions.
    split: dQ in a pass of its own; then dq, or both dk and dv, may be None.
    """
    rows = {"lse": lse} | ({} if dlse is None else {"dlse": dlse})
    like_q = {"out": out, "dout": dout} | ({} if dq is None else {"dq": dq})
    if (dk is None) != (dv is None):
        raise ValueError("dk and dv are made together, one of them is None")
    like_k = {} if dk is None or dv is None else {"dk": dk, "dv": dv}
    check_shapes(q, k, v, like_q, like_k, rows, options.key_mask)
    options.check(q, k, workspace=workspace)
    scale, stream = finite(options.scale), options.stream
    config = options.config("backward", q, k, deterministic=workspace, dlse=dlse is not None, query_gradient=not split)
    gradient = None
    if dbias is not None:
        partial = not options.features(q, k).isdisjoint(("causal", "window", "block_mask"))
        gradient = _bias_gradient(
            backend, options.changes, q, k, dk, dbias, deterministic=workspace or split, partial=partial
        )
        config = replace(config, bias_gradient=gradient.form)
    batch, heads, all_rows, head_dim = q.shape  # packed sequences are rows like others to some
    kv_heads = k.shape[1]
    items, seqlen_q, seqlen_k = options.sizes(q, k)
    query_blocks = batch * heads * tiles(all_rows, config.row_block_m)
    key_tiles = tiles(seqlen_k, config.tile.block_n)
    key_blocks = items * kv_heads * key_tiles
    preprocess, postprocess = config.row_kernels()

    slabs = 0 if split else key_tiles if workspace else 1
    delta = backend.empty("delta", (batch, heads, all_rows), "fp32")
    dq_accum = backend.empty("dq_accum", (slabs * batch, heads, all_rows, head_dim), "fp32")
    if query_blocks:
        args: list[Argument] = [
            out.with_access("r", "out"),
            dout.with_access("r", "dout"),
            delta.with_access("w"),
            np.int32(heads),
            np.int32(all_rows),
            np.int32(head_dim),
        ]
        if dlse is not None:
            args.append(dlse.with_access("r", "dlse"))
        if not workspace and not split:
            args.append(dq_accum.with_access("w"))
        backend.launch(preprocess, (query_blocks, 1, 1), 0, args, stream)
    if options.sink_logits is not None and options.dsink_logits is not None:
        _sink_gradient(backend, lse, delta, options.sink_logits, options.dsink_logits, stream)
    operands: list[Argument] = [
        options.rows(q, "r", "q"),
        options.rows(k, "r", "k"),
        options.rows(v, "r", "v"),
        options.rows(dout, "r", "dout"),
        options.rows(lse, "r", "lse"),
        options.rows(delta, "r"),
    ]
    # The workspace is written in part: a causal or sparse pass skips tiles of it.
    sums = [] if split else [options.rows(dq_accum, "rw" if workspace else "atomic")]
    if key_blocks and dk is not None and dv is not None:
        if gradient is not None:
            gradient.zero(backend, stream)
        args = [
            *operands,
            *sums,
            options.rows(dk, "w", "dk"),
            options.rows(dv, "w", "dv"),
            np.int32(items),
            np.int32(kv_heads),
            np.int32(heads // kv_heads),
            np.int32(seqlen_q),
            np.int32(seqlen_k),
            np.int32(head_dim),
            np.float32(scale),
            *options.changes.arguments(scale),
            *([] if gradient is None else [gradient.argument()]),
            *options.masks(),
            *options.walk(backend, config, q, k),
        ]
        backend.launch(config.kernel(), (key_blocks, 1, 1), config.shared_bytes, args, stream)
        if gradient is not None:
            gradient.finish(backend, stream)
    if dq is None or not query_blocks:
        return
    if split:
        config = options.config("backward-dq", q, k)
        args = [
            *operands,
            options.rows(dq, "w", "dq"),
            np.int32(heads),
            np.int32(heads // kv_heads),
            np.int32(seqlen_q),
            np.int32(seqlen_k),
            np.int32(head_dim),
            np.float32(scale),
            *options.changes.arguments(scale),
            *options.masks(),
            *options.walk(backend, config, q, k),
        ]
        blocks = items * heads * tiles(seqlen_q, config.tile.block_m)
        backend.launch(config.kernel(), (blocks, 1, 1), config.shared_bytes, args, stream)
    else:
        args = [
            dq_accum.with_access("r"),
            dq.with_access("w", "dq"),
            np.int32(batch),
            np.int32(heads),
            np.int32(all_rows),
            np.int32(seqlen_k),
            np.int32(head_dim),
            np.float32(scale),
        ]
        flags_bytes = 0
        if workspace and options.block_mask is not None:
            args.append(options.block_mask.with_access("r", "block_mask"))
            flags_bytes = 4 * postprocess.threads
        if workspace:
            args += window_arguments(options.hidden(q, k))
        backend.launch(postprocess, (query_blocks, 1, 1), flags_bytes, args, stream)


def _sink_gradient(
    backend: Backend, lse: Array, delta: Array, logits: Array, gradient: Array, stream: int | None
) -> None:
    """A block a head; 16 sums of warps, and the logit, in shared memory."""
    batch, heads, rows = lse.shape
    kernel = Kernel("flash_sink_gradient.cu", "flash_sink_postprocess", (), 512)
    args: list[Argument] = [
        lse.with_access("r", "lse"),
        delta.with_access("r"),
        logits.with_access("r", "sink_logits"),
        gradient.with_access("w", "dsink_logits"),
        np.int32(batch),
        np.int32(rows),
    ]
    backend.launch(kernel, (heads, 1, 1), 4 * (512 // 32 + 1), args, stream)


def _bias_gradient(
    backend: Backend,
    changes: ScoreChanges,
    q: Array,
    k: Array,
    dk: Array | None,
    dbias: Array,
    *,
    deterministic: bool,
    partial: bool,
) -> BiasGradient:
    """ValueError or TypeError for a gradient that has no bias, or does not fit it."""
    if changes.bias is None:
        raise ValueError("dbias without a bias")
    if dk is None:
        raise ValueError("dbias is made together with dk and dv, which are None")
    check_bias("dbias", dbias, q, k)
    if dbias.shape != changes.bias.shape:
        raise ValueError(f"dbias has shape {dbias.shape}, bias {changes.bias.shape}")
    return BiasGradient.start(backend, dbias, q, deterministic=deterministic, partial=partial)
