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
    k, v               uint8 where scales are given: e4m3; the sm_80 forward alone
    k_scale, v_scale   (B, Hkv, 1), or (B, Hkv, ceil(Nk / scale_block)), fp32 (``kernels.fp8``)
    window, sinks      which keys a query sees, ``analysis.window``; the flash kernels
    packed             sequences of different lengths one after another along N, B = 1; alibi_slopes
                       are then (sequences, H, 1); the flash kernels
    block_mask         (B, H, ceil(Nq / rows), ceil(Nk / keys)) uint8; stride 0 shares it

Algorithms, each of them the name of definite kernels, are those of ``analysis.algorithms``: the
sm_80 flash kernels are in ``kernels.flash``, the others in ``kernels.hopper`` and
``kernels.ladder``.
``kernels.dispatch`` says which suits a problem and a device best.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from analysis import algorithms
from analysis.algorithms import DqSum, Family, of_family
from analysis.arguments import checked
from analysis.shapes import Tile
from analysis.window import Sides
from kernels import flash, hopper, ladder
from kernels.flash_config import (
    OTHER_REGISTERS,
    SHARED_LIMIT_BYTES,
    FlashConfig,
    configure,
    default_tile,
    padded_head_dim,
    shared_bytes,
)
from kernels.fp8 import key_scales
from kernels.ladder_arrays import saved
from kernels.launch import Array, Backend, Size, Word
from kernels.packed import Packed
from kernels.scores import ScoreChanges
from kernels.window import window_of

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
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    scale_block: int | None = None,
    packed: Packed | None = None,
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
        softcap, alibi_slopes, bias: :class:`kernels.scores.ScoreChanges`; "flash…"; without a
            bias Hopper's but the optimistic forward and, at head_dim 64, a softcap's backward.
        k_scale, v_scale, scale_block: of k and v in e4m3, :class:`kernels.fp8.KeyScales`; the same.
        packed: :class:`kernels.packed.Packed`; refused with key_mask, block_mask, bias, scales
            of e4m3, a sawtooth, progress, the backward of "flash-deterministic", and by Hopper's
            kernels with a window, softcap or alibi_slopes, and in their optimistic forward.
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
    _check_order(algorithm, "forward", order, wave)
    options = flash.Options(
        scale=scale, causal=causal,
        window=window_of(q, k, causal, window, sinks, None if packed is None else packed.lengths),
        changes=ScoreChanges(softcap, alibi_slopes, bias), tile=tile, key_mask=key_mask,
        dropout_p=dropout_p, seed=seed, block_mask=block_mask, block_size=block_size,
        order=order, wave=wave, shared_limit_bytes=shared_limit_bytes, stream=stream,
        key_scales=key_scales(k_scale, v_scale, scale_block),
        packed=packed,
    )  # fmt: skip
    if chosen.family is not Family.FLASH and progress is not None:
        raise ValueError(f"{algorithm} keeps no notes of its progress")
    if chosen.family is Family.HOPPER:
        _refuse(algorithm, options, but=() if chosen.optimistic else HOPPER_FEATURES)
        _with_lse(backend, q, stats)
        hopper.forward(
            backend, q, k, v, out, stats["lse"], scale=scale, causal=causal,
            window=options.window, changes=options.changes, tile=tile, order=order, wave=wave,
            optimistic=chosen.optimistic, packed=packed, pdl=pdl, stream=stream,
        )  # fmt: skip
        return
    if pdl:
        raise ValueError(f"{algorithm} has no kernels that start early: pdl=True is for Hopper's")
    if chosen.family is not Family.FLASH:
        _refuse(algorithm, options)
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
    flash.forward(
        backend, q, k, v, out, _with_lse(backend, q, stats),
        options, progress=progress, progress_tiles=progress_tiles,
    )  # fmt: skip


def _saved_lse(algorithm: str, q: Array, stats: dict[str, Array]) -> Array:
    """What the forward pass left; ValueError if it is not there, or of another shape."""
    return saved(stats, "lse", algorithm, q.shape[:3], "fp32")


def _check_order(algorithm: str, pass_: str, order: str, wave: int | None) -> None:
    algorithms.check_order(algorithm, pass_, order)
    if wave is not None and (order != "sawtooth" or wave < 1):
        raise ValueError(
            f"wave={wave} with order={order!r}: it is the number of blocks that run at a time, of "
            "a sawtooth"
        )


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
    packed: Packed | None = None,
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
    _check_order(algorithm, "backward", order, wave)
    options = flash.Options(
        scale=scale, causal=causal,
        window=window_of(q, k, causal, window, sinks, None if packed is None else packed.lengths),
        changes=ScoreChanges(softcap, alibi_slopes, bias), tile=tile, key_mask=key_mask,
        dropout_p=dropout_p, seed=seed, block_mask=block_mask, block_size=block_size,
        order=order, wave=wave, shared_limit_bytes=shared_limit_bytes, stream=stream,
        packed=packed,
    )  # fmt: skip
    split = chosen.dq is DqSum.SEPARATE_PASS
    if not split and (dq is None or dk is None or dv is None):
        raise ValueError(f"{algorithm} makes dq, dk and dv together, none of them may be None")
    if pdl and chosen.family is not Family.HOPPER:
        raise ValueError(f"{algorithm} has no kernels that start early: pdl=True is for Hopper's")
    if chosen.family is not Family.FLASH:
        assert dq is not None
        assert dk is not None
        assert dv is not None
        if chosen.family is Family.HOPPER:
            _refuse(algorithm, options, but=HOPPER_FEATURES)
            hopper.backward(
                backend, q, k, v, out, dout, _saved_lse(algorithm, q, stats), dq, dk, dv,
                scale=scale, causal=causal, window=options.window, changes=options.changes,
                tile=tile, dlse=dlse, order=order, wave=wave, packed=packed,
                deterministic=chosen.dq is DqSum.ORDERED, pdl=pdl, stream=stream,
            )  # fmt: skip
            return
        _refuse(algorithm, options, dlse=dlse)
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
    flash.backward(
        backend, q, k, v, out, dout, _saved_lse(algorithm, q, stats), dq, dk, dv,
        options, dlse=dlse, dbias=dbias, workspace=chosen.dq is DqSum.WORKSPACE, split=split,
    )  # fmt: skip


def _with_lse(backend: Backend, q: Array, stats: dict[str, Array]) -> Array:
    if "lse" not in stats:
        stats["lse"] = backend.empty("lse", q.shape[:3], "fp32")
    return stats["lse"]


#: What the Hopper kernels take beside a causal mask, but for the optimistic forward.
HOPPER_FEATURES = ("window", "softcap", "alibi_slopes", "packed")


def _refuse(algorithm: str, options: flash.Options, but: Collection[str] = (), **more: Any) -> None:
    """All but the sm_80 flash kernels have causal masks and nothing else, ``but`` what is named."""
    features = {
        "key_mask": options.key_mask, "dropout_p": options.dropout_p,
        "block_mask": options.block_mask, "window": options.window,
        "softcap": options.changes.softcap, "alibi_slopes": options.changes.alibi_slopes,
        "bias": options.changes.bias, "k_scale": options.key_scales, "packed": options.packed,
    }  # fmt: skip
    given = {name: x for name, x in (features | more).items() if name not in but}
    asked = [name for name, value in given.items() if value not in (None, 0.0)]
    if asked:
        raise ValueError(f"{algorithm} does not take {', '.join(asked)}")
