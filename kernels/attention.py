"""Attention on arrays: one ``forward`` and one ``backward`` for every step of the ladder.

Both take :class:`kernels.launch.Array` views and a backend, and launch kernels; they allocate
nothing but scratch. The torch operator (``repro.flash_attention``), the experiments and the tests
all come through here.

Arrays, in the io dtype unless said otherwise; the last dimension is contiguous:

    q, out, dout, dq   (B, H, Nq, D)
    k, v, dk, dv       (B, Hkv, Nk, D), Hkv divides H
    stats["lse"]       (B, H, Nq) fp32, natural logarithm, -inf for a row that sees no key
                       (flash; the steps of kernels.ladder keep other statistics)
    key_mask           (B, Nk) uint8, dense; 0 takes the key out
    alibi_slopes       (B, H, 1) fp32; stride 0 shares it
    bias, dbias        (1 or B, 1 or H, Nq, Nk)
    window, sinks      which keys a query sees, ``analysis.window``; the sm_80 flash kernels alone
    block_mask         (B, H, ceil(Nq / rows), ceil(Nk / keys)) uint8; stride 0 shares it

Algorithms, each of them the name of definite kernels, are those of ``analysis.algorithms``: the
sm_80 flash kernels are here, the others in ``kernels.hopper`` and ``kernels.ladder``.
``kernels.dispatch`` says which suits a problem and a device best.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from analysis import algorithms
from analysis.algorithms import DqSum, Family, of_family
from analysis.arguments import checked
from analysis.shapes import Tile
from analysis.window import Sides, Window
from kernels import hopper, ladder
from kernels.bias_gradient import BiasGradient
from kernels.checks import check_shapes, finite
from kernels.flash_config import (
    OTHER_REGISTERS,
    SHARED_LIMIT_BYTES,
    FlashConfig,
    configure,
    default_tile,
    padded_head_dim,
    shared_bytes,
)
from kernels.ladder_arrays import saved
from kernels.launch import Argument, Array, Backend, Count, Size, Word
from kernels.philox import drop_threshold, keep_scale
from kernels.scores import ScoreChanges, check_bias
from kernels.window import window_arguments, window_of

__all__ = [
    "FLASH",
    "OTHER_REGISTERS",
    "SHARED_LIMIT_BYTES",
    "FlashConfig",
    "backward",
    "configure",
    "default_tile",
    "forward",
    "padded_head_dim",
    "shared_bytes",
]

FLASH = of_family(Family.FLASH)
HOPPER = of_family(Family.HOPPER)
ALGORITHMS = tuple(algorithms.ALGORITHMS)


@checked
def forward(
    backend: Backend,
    algorithm: str,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    stats: dict[str, Array],
    *,
    scale: float,
    causal: bool = False,
    window: Sides = (None, None),
    sinks: Size = 0,
    tile: Tile | None = None,
    key_mask: Array | None = None,
    dropout_p: float = 0.0,
    seed: Word = 0,
    block_mask: Array | None = None,
    block_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    order: str = "rows",
    wave: Size | None = None,
    progress: Array | None = None,
    progress_tiles: Size = 0,
    shared_limit_bytes: Size = SHARED_LIMIT_BYTES,
    stream: Word | None = None,
    pdl: bool = False,
) -> None:
    """out = softmax(scale · q kᵀ) v and its row statistics.

    Args:
        stats: receives the statistics; "flash" fills ``stats["lse"]`` if it is there already.
        causal: query i sees key j when j <= i + Nk - Nq.
        window, sinks: (left, right) keys around its diagonal i + Nk - Nq, None: unlimited; and the
            first keys, whatever the window.
        tile: rows of q and of k, v a tile; default :func:`default_tile`.
        dropout_p, seed: :func:`kernels.philox.kept_weights` is the mask.
        block_size: (rows, keys) of a block of ``block_mask``, multiples of the tile; default: the
            tile.
        softcap, alibi_slopes, bias: :class:`kernels.scores.ScoreChanges`; "flash…" but Hopper's.
        order: of the walk, of the flash kernels of either family. "rows": as each does by itself.
            "sawtooth": the other way round in every second wave of blocks, for the same bytes at
            the SM boundary and fewer from HBM where what blocks share outgrows L2
            (``analysis.l2``). Sums are then added in another order in those waves.
        wave: blocks that run at a time, of "sawtooth" alone; by default SMs times the blocks that
            an SM holds.
        progress: (blocks, notes) int64, zeros; "flash" only. Receives of each block its SM, the
            time it started, the time after every ``progress_tiles`` key tiles, and in the last
            column the time of its end: ``progress_notes`` columns.
        shared_limit_bytes: shared memory a block may have.
        stream: where a GPU backend queues the work.
        pdl: let kernels of the pass overlap where they meet (programmatic dependent launch); the
            Hopper kernels do, no others.

    Raises:
        TypeError, ValueError: before anything is launched, naming the values that disagree.
    """
    chosen = algorithms.find(algorithm)
    changes = ScoreChanges(softcap, alibi_slopes, bias)
    _check_order(algorithm, "forward", order, wave)
    seen = window_of(q, k, causal, window, sinks)
    features = _features(key_mask, dropout_p, block_mask, seen)
    if chosen.family is not Family.FLASH and progress is not None:
        raise ValueError(f"{algorithm} keeps no notes of its progress")
    if chosen.family is Family.HOPPER:
        _refuse(algorithm, changes, **features)
        _with_lse(backend, q, stats)
        hopper.forward(
            backend, q, k, v, out, stats["lse"],
            scale=scale, causal=causal, tile=tile, order=order, wave=wave,
            optimistic=chosen.optimistic, pdl=pdl, stream=stream,
        )  # fmt: skip
        return
    if pdl:
        raise ValueError(f"{algorithm} has no kernels that start early: pdl=True is for Hopper's")
    if chosen.family is not Family.FLASH:
        _refuse(algorithm, changes, **features)
        settings: dict[str, Any] = {
            "scale": scale, "tile": tile,
            "shared_limit_bytes": shared_limit_bytes, "stream": stream,
        }  # fmt: skip
        if chosen.form:
            ladder.flash1_forward(
                backend, q, k, v, out, stats, causal=causal, form=chosen.form, **settings
            )
        else:
            ladder.standard_forward(backend, q, k, v, out, stats, causal=causal, **settings)
        return
    lse = _with_lse(backend, q, stats)
    check_shapes(q, k, v, {"out": out}, {}, {"lse": lse}, key_mask)
    changes.check(q, k)
    scale = finite(scale)
    config = configure(
        "forward", q.dtype, q.shape[3],
        tile=tile, limit=shared_limit_bytes,
        block_size=_block_size(block_mask, block_size, tile, q, k, "forward", shared_limit_bytes),
        causal=causal, window=seen is not None, key_mask=key_mask is not None,
        dropout=dropout_p != 0.0,
        any_scale=scale <= 0.0, sawtooth=order == "sawtooth", **changes.features,
        progress=progress_tiles if progress is not None else 0,
    )  # fmt: skip
    batch, heads, seqlen_q, head_dim = q.shape
    blocks = batch * heads * _tiles(seqlen_q, config.tile.block_m)
    if progress is not None:
        _check_progress(progress, blocks, config, k.shape[2])
    if blocks == 0:
        return
    args: list[Argument] = [
        q.with_access("r", "q"),
        k.with_access("r", "k"),
        v.with_access("r", "v"),
        out.with_access("w", "out"),
        lse.with_access("w", "lse"),
        np.int32(heads),
        np.int32(heads // k.shape[1]),
        np.int32(seqlen_q),
        np.int32(k.shape[2]),
        np.int32(head_dim),
        np.float32(scale),
        *changes.arguments(),
        *_mask_arguments(key_mask, dropout_p, seed, block_mask),
    ]
    args += [*_wave(backend, config, wave, shared_limit_bytes), *window_arguments(seen)]
    if progress is not None:
        args += [progress.with_access("rw", "progress"), np.int32(progress.shape[1])]
    backend.launch(config.kernel(), (blocks, 1, 1), config.shared_bytes, args, stream)


def _saved_lse(algorithm: str, q: Array, stats: dict[str, Array]) -> Array:
    """What the forward pass left; ValueError if it is not there, or of another shape."""
    return saved(stats, "lse", algorithm, q.shape[:3], "fp32")


@checked
def progress_notes(seqlen_k: Size, block_n: Count, progress_tiles: Size) -> int:
    """Columns of ``progress``: SM, start, a note for every ``progress_tiles`` key tiles, end."""
    if progress_tiles < 1:
        raise ValueError(f"progress_tiles={progress_tiles} is below 1")
    return 3 + _tiles(seqlen_k, block_n) // progress_tiles


def _check_progress(progress: Array, blocks: int, config: FlashConfig, seqlen_k: int) -> None:
    wanted = (blocks, progress_notes(seqlen_k, config.tile.block_n, config.progress))
    if progress.dtype != "int64" or progress.shape != wanted:
        raise ValueError(
            f"progress is {progress.dtype} {progress.shape}, not int64 {wanted} (blocks, notes)"
        )


def _check_order(algorithm: str, pass_: str, order: str, wave: int | None) -> None:
    algorithms.check_order(algorithm, pass_, order)
    if wave is not None and (order != "sawtooth" or wave < 1):
        raise ValueError(
            f"wave={wave} with order={order!r}: it is the number of blocks that run at a time, of "
            "a sawtooth"
        )


def _wave(backend: Backend, config: FlashConfig, wave: int | None, limit: int) -> list[Argument]:
    """The last argument of a kernel that walks in a sawtooth."""
    if not config.sawtooth:
        return []
    return [np.int32(wave or backend.multiprocessors * config.blocks_per_sm(limit))]


@checked
def backward(
    backend: Backend,
    algorithm: str,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    stats: dict[str, Array],
    dq: Array | None,
    dk: Array | None,
    dv: Array | None,
    *,
    scale: float,
    causal: bool = False,
    window: Sides = (None, None),
    sinks: Size = 0,
    tile: Tile | None = None,
    dlse: Array | None = None,
    dbias: Array | None = None,
    key_mask: Array | None = None,
    dropout_p: float = 0.0,
    seed: Word = 0,
    block_mask: Array | None = None,
    block_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    order: str = "rows",
    wave: Size | None = None,
    shared_limit_bytes: Size = SHARED_LIMIT_BYTES,
    stream: Word | None = None,
    pdl: bool = False,
) -> None:
    """dq, dk, dv from dout (and ``dlse``, the gradient of lse), P recomputed from the statistics.

    dbias: receives the gradient of ``bias``, in its shape, where there is one; it is made together
    with dk and dv, in the order that dq is summed in (``kernels.bias_gradient``).

    Arguments as in :func:`forward`; dropout needs the same ``dropout_p`` and ``seed``. With
    "flash-split" dq, or both dk and dv, may be None: their pass is then left out.
    "flash-sm90-deterministic" has no sawtooth: its waves would wait for each other.
    """
    chosen = algorithms.find(algorithm)
    changes = ScoreChanges(softcap, alibi_slopes, bias)
    _check_order(algorithm, "backward", order, wave)
    seen = window_of(q, k, causal, window, sinks)
    features = _features(key_mask, dropout_p, block_mask, seen)
    split = chosen.dq is DqSum.SEPARATE_PASS
    if not split and (dq is None or dk is None or dv is None):
        raise ValueError(f"{algorithm} makes dq, dk and dv together, none of them may be None")
    if pdl and chosen.family is not Family.HOPPER:
        raise ValueError(f"{algorithm} has no kernels that start early: pdl=True is for Hopper's")
    if chosen.family is not Family.FLASH:
        assert dq is not None
        assert dk is not None
        assert dv is not None
        _refuse(algorithm, changes, **features)
        if chosen.family is Family.HOPPER:
            hopper.backward(
                backend, q, k, v, out, dout, _saved_lse(algorithm, q, stats), dq, dk, dv,
                scale=scale, causal=causal, tile=tile, dlse=dlse, order=order, wave=wave,
                deterministic=chosen.dq is DqSum.ORDERED, pdl=pdl, stream=stream,
            )  # fmt: skip
            return
        _refuse(algorithm, changes, dlse=dlse)
        settings: dict[str, Any] = {
            "scale": scale, "tile": tile,
            "shared_limit_bytes": shared_limit_bytes, "stream": stream,
        }  # fmt: skip
        if chosen.form:
            ladder.flash1_backward(
                backend, q, k, v, out, dout, stats, dq, dk, dv,
                causal=causal, form=chosen.form, **settings,
            )  # fmt: skip
        else:  # the mask is in the stored P
            ladder.standard_backward(backend, q, k, v, dout, stats, dq, dk, dv, **settings)
        return
    lse = _saved_lse(algorithm, q, stats)
    rows = {"lse": lse} | ({} if dlse is None else {"dlse": dlse})
    like_q = {"out": out, "dout": dout} | ({} if dq is None else {"dq": dq})
    if (dk is None) != (dv is None):
        raise ValueError("dk and dv are made together, one of them is None")
    like_k = {} if dk is None or dv is None else {"dk": dk, "dv": dv}
    check_shapes(q, k, v, like_q, like_k, rows, key_mask)
    changes.check(q, k)
    scale = finite(scale)
    deterministic = chosen.dq is DqSum.WORKSPACE
    config = configure(
        "backward", q.dtype, q.shape[3],
        tile=tile, limit=shared_limit_bytes,
        block_size=_block_size(block_mask, block_size, tile, q, k, "backward", shared_limit_bytes),
        causal=causal, window=seen is not None, key_mask=key_mask is not None,
        dropout=dropout_p != 0.0,
        deterministic=deterministic, dlse=dlse is not None, query_gradient=not split,
        sawtooth=order == "sawtooth", **changes.features,
    )  # fmt: skip
    gradient = None
    if dbias is not None:
        gradient = _bias_gradient(
            backend, changes, q, k, dk, dbias,
            deterministic=deterministic or split,
            partial=causal or seen is not None or block_mask is not None,
        )  # fmt: skip
        config = replace(config, bias_gradient=gradient.form)
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    query_blocks = batch * heads * _tiles(seqlen_q, config.row_block_m)
    key_tiles = _tiles(seqlen_k, config.tile.block_n)
    key_blocks = batch * kv_heads * key_tiles
    preprocess, postprocess = config.row_kernels()

    slabs = 0 if split else key_tiles if deterministic else 1
    delta = backend.empty("delta", (batch, heads, seqlen_q), "fp32")
    dq_accum = backend.empty("dq_accum", (slabs * batch, heads, seqlen_q, head_dim), "fp32")
    masks = _mask_arguments(key_mask, dropout_p, seed, block_mask)
    if query_blocks:
        args: list[Argument] = [
            out.with_access("r", "out"),
            dout.with_access("r", "dout"),
            delta.with_access("w"),
            np.int32(heads),
            np.int32(seqlen_q),
            np.int32(head_dim),
        ]
        if dlse is not None:
            args.append(dlse.with_access("r", "dlse"))
        if not deterministic and not split:
            args.append(dq_accum.with_access("w"))
        backend.launch(preprocess, (query_blocks, 1, 1), 0, args, stream)
    operands: list[Argument] = [
        q.with_access("r", "q"),
        k.with_access("r", "k"),
        v.with_access("r", "v"),
        dout.with_access("r", "dout"),
        lse.with_access("r", "lse"),
        delta.with_access("r"),
    ]
    # The workspace is written in part: a causal or sparse pass skips tiles of it.
    sums = [] if split else [dq_accum.with_access("rw" if deterministic else "atomic")]
    if key_blocks and dk is not None and dv is not None:
        if gradient is not None:
            gradient.zero(backend, stream)
        args = [
            *operands,
            *sums,
            dk.with_access("w", "dk"),
            dv.with_access("w", "dv"),
            np.int32(batch),
            np.int32(kv_heads),
            np.int32(heads // kv_heads),
            np.int32(seqlen_q),
            np.int32(seqlen_k),
            np.int32(head_dim),
            np.float32(scale),
            *changes.arguments(),
            *([] if gradient is None else [gradient.argument()]),
            *masks,
            *_wave(backend, config, wave, shared_limit_bytes),
            *window_arguments(seen),
        ]
        backend.launch(config.kernel(), (key_blocks, 1, 1), config.shared_bytes, args, stream)
        if gradient is not None:
            gradient.finish(backend, stream)
    if dq is None or not query_blocks:
        return
    if split:
        config = configure(
            "backward-dq", q.dtype, head_dim, tile=tile, limit=shared_limit_bytes,
            block_size=_block_size(
                block_mask, block_size, tile, q, k, "backward-dq", shared_limit_bytes
            ),
            causal=causal, window=seen is not None, key_mask=key_mask is not None,
            dropout=dropout_p != 0.0, sawtooth=order == "sawtooth", **changes.features,
        )  # fmt: skip
        args = [
            *operands,
            dq.with_access("w", "dq"),
            np.int32(heads),
            np.int32(heads // kv_heads),
            np.int32(seqlen_q),
            np.int32(seqlen_k),
            np.int32(head_dim),
            np.float32(scale),
            *changes.arguments(),
            *masks,
            *_wave(backend, config, wave, shared_limit_bytes),
            *window_arguments(seen),
        ]
        blocks = batch * heads * _tiles(seqlen_q, config.tile.block_m)
        backend.launch(config.kernel(), (blocks, 1, 1), config.shared_bytes, args, stream)
    else:
        args = [
            dq_accum.with_access("r"),
            dq.with_access("w", "dq"),
            np.int32(batch),
            np.int32(heads),
            np.int32(seqlen_q),
            np.int32(seqlen_k),
            np.int32(head_dim),
            np.float32(scale),
        ]
        flags_bytes = 0
        if deterministic and block_mask is not None:
            args.append(block_mask.with_access("r", "block_mask"))
            flags_bytes = 4 * postprocess.threads
        if deterministic:
            args += window_arguments(seen)
        backend.launch(postprocess, (query_blocks, 1, 1), flags_bytes, args, stream)


def _bias_gradient(
    backend: Backend, changes: ScoreChanges, q: Array, k: Array, dk: Array | None, dbias: Array,
    *, deterministic: bool, partial: bool,
) -> BiasGradient:  # fmt: skip
    """ValueError or TypeError for a gradient that has no bias, or does not fit it."""
    if changes.bias is None:
        raise ValueError("dbias without a bias")
    if dk is None:
        raise ValueError("dbias is made together with dk and dv, which are None")
    check_bias("dbias", dbias, q, k)
    if dbias.shape != changes.bias.shape:
        raise ValueError(f"dbias has shape {dbias.shape}, bias {changes.bias.shape}")
    return BiasGradient.start(backend, dbias, q, deterministic=deterministic, partial=partial)


def _with_lse(backend: Backend, q: Array, stats: dict[str, Array]) -> Array:
    if "lse" not in stats:
        stats["lse"] = backend.empty("lse", q.shape[:3], "fp32")
    return stats["lse"]


def _tiles(rows: int, block: int) -> int:
    return -(-rows // block)


def _features(
    key_mask: Array | None, dropout_p: float, block_mask: Array | None, window: Window | None
) -> dict[str, Any]:
    """Those of the sm_80 flash kernels alone."""
    return {
        "key_mask": key_mask, "dropout_p": dropout_p, "block_mask": block_mask, "window": window,
    }  # fmt: skip


def _refuse(algorithm: str, changes: ScoreChanges, **features: Any) -> None:
    """All but the sm_80 flash kernels have causal masks and nothing else."""
    features |= {
        "softcap": changes.softcap, "alibi_slopes": changes.alibi_slopes, "bias": changes.bias,
    }  # fmt: skip
    asked = [name for name, value in features.items() if value not in (None, 0.0)]
    if asked:
        raise ValueError(f"{algorithm} does not take {', '.join(asked)}")


def _mask_arguments(
    key_mask: Array | None, dropout_p: float, seed: int, block_mask: Array | None
) -> list[Argument]:
    args: list[Argument] = []
    if key_mask is not None:
        args.append(key_mask.with_access("r", "key_mask"))
    if dropout_p != 0.0:
        args += [
            np.uint64(seed),
            np.uint32(drop_threshold(dropout_p)),
            np.float32(keep_scale(dropout_p)),
        ]
    if block_mask is not None:
        args.append(block_mask.with_access("r", "block_mask"))
    return args


def _block_size(
    block_mask: Array | None,
    block_size: tuple[int, int] | None,
    tile: Tile | None,
    q: Array,
    k: Array,
    pass_: str,
    limit: int,
) -> tuple[int, int] | None:
    if block_mask is None:
        if block_size is not None:
            raise ValueError(f"block_size={block_size} without a block_mask")
        return None
    if block_size is None:
        tile = tile or default_tile(q.shape[3], q.dtype, pass_, limit)
        block_size = (tile.block_m, tile.block_n)
    if block_mask.dtype != "uint8":
        raise TypeError(f"block_mask has dtype {block_mask.dtype}, not uint8")
    expected = (
        *q.shape[:2],
        _tiles(q.shape[2], block_size[0]),
        _tiles(k.shape[2], block_size[1]),
    )
    if block_mask.shape != expected:
        raise ValueError(
            f"block_mask has shape {block_mask.shape}, blocks of {block_size} make it {expected}"
        )
    return block_size
