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
from analysis.features import refused
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
from kernels.ladder_arrays import saved
from kernels.launch import Array, Backend, Size
from kernels.options import Options

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
    progress: Array | None = None,
    progress_tiles: Size = 0,
    pdl: bool = False,
    **asked: Any,
) -> None:
    """out = softmax(scale · q kᵀ) v and its row statistics.

    Args:
        stats: receives the statistics; "flash" fills ``stats["lse"]`` if it is there already.
        progress: (blocks, notes) int64, zeros; "flash" only. Receives of each block its SM, the
            time it started, the time after every ``progress_tiles`` key tiles, and in the last
            column the time of its end: ``progress_notes`` columns.
        pdl: let kernels of the pass overlap where they meet (programmatic dependent launch); the
            Hopper kernels do, no others.
        asked: the fields of :class:`kernels.options.Options`, ``scale`` at least.

    Raises:
        TypeError, ValueError: before anything is launched, naming the values that disagree.
    """
    chosen = algorithms.find(algorithm)
    options = Options(**asked)
    algorithms.check_order(algorithm, "forward", options.order)
    if chosen.family is not Family.FLASH and progress is not None:
        raise ValueError(f"{algorithm} keeps no notes of its progress")
    if pdl and chosen.family is not Family.HOPPER:
        raise ValueError(f"{algorithm} has no kernels that start early: pdl=True is for Hopper's")
    _refuse(algorithm, "forward", options.features(q, k))
    if chosen.family is Family.HOPPER:
        _with_lse(backend, q, stats)
        hopper.forward(backend, q, k, v, out, stats["lse"], optimistic=chosen.optimistic, pdl=pdl, **asked)
    elif chosen.family is Family.FLASH:
        lse = _with_lse(backend, q, stats)
        flash.forward(backend, q, k, v, out, lse, options, progress, progress_tiles)
    elif chosen.form:
        ladder.flash1_forward(
            backend, q, k, v, out, stats, causal=options.causal, form=chosen.form, **_for_ladder(options)
        )
    else:
        ladder.standard_forward(backend, q, k, v, out, stats, causal=options.causal, **_for_ladder(options))


def _for_ladder(options: Options) -> dict[str, Any]:
    same = ("scale", "tile", "shared_limit_bytes", "stream")
    return {name: getattr(options, name) for name in same}


def _saved_lse(algorithm: str, q: Array, stats: dict[str, Array]) -> Array:
    """What the forward pass left; ValueError if it is not there, or of another shape."""
    return saved(stats, "lse", algorithm, q.shape[:3], "fp32")


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
    dlse: Array | None = None,
    dbias: Array | None = None,
    pdl: bool = False,
    **asked: Any,
) -> None:
    """dq, dk, dv from dout (and ``dlse``, the gradient of lse), P recomputed from the statistics.

    dbias: receives the gradient of ``bias``, in its shape, where there is one; it is made together
    with dk and dv, in the order that dq is summed in (``kernels.bias_gradient``).

    Arguments as in :func:`forward`; dropout needs the same ``dropout_p`` and ``seed``. With
    "flash-split" dq, or both dk and dv, may be None: their pass is then left out.
    "flash-sm90-deterministic" has no sawtooth: its waves would wait for each other.
    """
    chosen = algorithms.find(algorithm)
    options = Options(**asked)
    algorithms.check_order(algorithm, "backward", options.order)
    split = chosen.dq is DqSum.SEPARATE_PASS
    if not split and (dq is None or dk is None or dv is None):
        raise ValueError(f"{algorithm} makes dq, dk and dv together, none of them may be None")
    if pdl and chosen.family is not Family.HOPPER:
        raise ValueError(f"{algorithm} has no kernels that start early: pdl=True is for Hopper's")
    with_lse = {"lse_gradient"} if dlse is not None else set()
    _refuse(algorithm, "backward", options.features(q, k) | with_lse)
    if chosen.family is Family.FLASH:
        flash.backward(
            backend,
            q,
            k,
            v,
            out,
            dout,
            _saved_lse(algorithm, q, stats),
            dq,
            dk,
            dv,
            options,
            dlse=dlse,
            dbias=dbias,
            workspace=chosen.dq is DqSum.WORKSPACE,
            split=split,
        )
        return
    assert dq is not None
    assert dk is not None
    assert dv is not None
    if chosen.family is Family.HOPPER:
        hopper.backward(
            backend,
            q,
            k,
            v,
            out,
            dout,
            _saved_lse(algorithm, q, stats),
            dq,
            dk,
            dv,
            dlse=dlse,
            deterministic=chosen.dq is DqSum.ORDERED,
            pdl=pdl,
            **asked,
        )
    elif chosen.form:
        ladder.flash1_backward(
            backend,
            q,
            k,
            v,
            out,
            dout,
            stats,
            dq,
            dk,
            dv,
            causal=options.causal,
            form=chosen.form,
            **_for_ladder(options),
        )
    else:  # the mask is in the stored P
        ladder.standard_backward(backend, q, k, v, dout, stats, dq, dk, dv, **_for_ladder(options))


def _with_lse(backend: Backend, q: Array, stats: dict[str, Array]) -> Array:
    if "lse" not in stats:
        stats["lse"] = backend.empty("lse", q.shape[:3], "fp32")
    return stats["lse"]


def _refuse(algorithm: str, pass_: str, features: Collection[str]) -> None:
    """ValueError naming the options that the algorithm's kernels do not take."""
    why = refused(algorithm, pass_, features)
    if why is not None:
        raise ValueError(why)
