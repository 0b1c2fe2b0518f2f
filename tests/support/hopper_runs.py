"""Run the Hopper kernels on the host in a form of choice, and the bytes that they should move."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from flash_support import Problem, aligned, check, reference, to_bits, to_float, view

from analysis.packed import Lengths
from analysis.traffic import Traffic, predict_traffic
from kernels import hopper
from kernels.hopper import BackwardForm, ForwardForm, packed_form
from kernels.host import HostBackend
from kernels.launch import Array, Kernel
from kernels.packed import Packed

Values = dict[str, np.ndarray]
#: Results, and what each has the shape of.
RESULTS = {"out": "q", "dq": "q", "dk": "k", "dv": "v"}
GRADIENTS = ("dq", "dk", "dv")
BOTH = ("forward", "backward")


def launch(
    p: Problem,
    form: ForwardForm | BackwardForm | None = None,
    passes: Sequence[str] = ("forward",),
    *,
    backend: HostBackend | None = None,
    arrays: dict[str, Array] | None = None,
    lengths: Lengths | None = None,
    **options: Any,
) -> Values:
    """out, lse and, of a backward, gradients; what the kernels leave unwritten is not a number.

    form: of the last pass. A backward alone starts from float64's out and lse, so that nothing but it
    is tried. arrays: in the place of those made here. lengths: of packed sequences, whose numbers ``p``
    has side by side. options: of the last pass.
    """
    backend = backend or HostBackend()
    memory = {
        name: aligned(p.data[RESULTS.get(name, name)].shape, p.dtype) for name in ("q", "k", "v", "dout", *RESULTS)
    }
    lse = aligned(p.data["q"].shape[:3], "fp32")
    exact = {"out": np.nan, "lse": np.nan} if "forward" in passes else reference(p)
    lse[...] = exact["lse"]
    for name, bits in memory.items():
        values = p.data.get(name, exact["out"] if name == "out" else np.nan)
        bits[...] = to_bits(np.broadcast_to(values, bits.shape), p.dtype)
    given = {name: view(name, bits, p.dtype) for name, bits in memory.items()} | (arrays or {})
    q, k, v, out, dout = (given[name] for name in ("q", "k", "v", "out", "dout"))
    statistics = view("lse", lse, "fp32")
    slopes = None if p.alibi_slopes is None else view("alibi_slopes", p.slopes(), "fp32")
    shared: dict[str, Any] = {"scale": p.scale, "causal": p.causal, "window": p.window, "sinks": p.sinks}
    shared |= {"softcap": p.softcap, "alibi_slopes": slopes}
    if lengths is not None:
        shared["packed"] = packed_of(lengths)
    own = {"form": form, **options}
    if "forward" in passes:
        hopper.forward(backend, q, k, v, out, statistics, **shared, **({} if "backward" in passes else own))
    if "backward" in passes:
        if p.with_dlse:
            shared["dlse"] = view("dlse", p.data["dlse"].astype(np.float32), "fp32")
        hopper.backward(backend, q, k, v, out, dout, statistics, *(given[n] for n in GRADIENTS), **shared, **own)
    names = list(RESULTS) if "backward" in passes else ["out"]
    return {name: to_float(memory[name], p.dtype) for name in names} | {"lse": lse.astype(np.float64)}


def features_of(p: Problem) -> bool:
    """Whether the problem has a window that hides something, a softcap or ALiBi."""
    return p.shape.windowed or p.softcap is not None or p.alibi_slopes is not None


def predicted(
    p: Problem,
    form: ForwardForm | BackwardForm | None = None,
    passes: Sequence[str] = ("forward",),
    *,
    lengths: Lengths | None = None,
    deterministic: bool = False,
) -> Traffic:
    """What a :func:`launch` moves."""
    featured = features_of(p) or lengths is not None
    options: dict[str, Any] = {"alibi": True} if p.alibi_slopes is not None else {}
    if lengths is not None:
        options["lengths"] = lengths
    total = Traffic({})
    if "forward" in passes:
        first = form if isinstance(form, ForwardForm) else None
        if first is None:
            chosen = packed_form(p.head_dim) if lengths is not None else None
            first = chosen or hopper.forward_form(p.head_dim, p.causal, p.seqlen_q, featured=featured)
        stays = {"persistent": True} if first.persistent and lengths is None else {}
        total += predict_traffic(hopper.ALGORITHM, p.shape, first.tile, "forward", **options, **stays)
    if "backward" in passes:
        last = form if isinstance(form, BackwardForm) else hopper.backward_form(p.head_dim, p.causal, featured=featured)
        algorithm = hopper.DETERMINISTIC if deterministic else hopper.ALGORITHM
        options["lse_gradient"] = p.with_dlse
        total += predict_traffic(algorithm, p.shape, last.tile, "backward", **options)
    return total


def hold(
    p: Problem, form: ForwardForm | BackwardForm | None = None, passes: Sequence[str] = ("forward",), **how: Any
) -> Values:
    """Values to float64 and bytes to the prediction."""
    backend = how.pop("backend", None) or HostBackend()
    got = launch(p, form, passes, backend=backend, **how)
    check(p, got)
    assert Traffic(backend.traffic).kernels == predicted(p, form, passes, **how).kernels
    return got


# ---- packed sequences ---------------------------------------------------------------------------


def problems(
    lengths: Lengths, head_dim: int, dtype: str, causal: bool, heads: int = 2, kv_heads: int = 1, seed: int = 0
) -> list[Problem]:
    """One for each sequence."""
    return [
        Problem(
            heads=heads,
            kv_heads=kv_heads,
            seqlen_q=queries,
            seqlen_k=keys,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
            scale=0.125,
            seed=seed + number,
        )
        for number, (queries, keys) in enumerate(zip(lengths.queries, lengths.keys, strict=True))
    ]


def packed_of(lengths: Lengths) -> Packed:
    q, k = (
        view(f"cu_seqlens_{side}", np.array(table, np.int32), "int32")
        for side, table in zip("qk", lengths.tables, strict=True)
    )
    return Packed(q, k, lengths)


def hold_packed(
    sequences: Sequence[Problem],
    form: ForwardForm | BackwardForm,
    alone: ForwardForm | BackwardForm,
    passes: Sequence[str] = ("forward",),
    *,
    backend: HostBackend | None = None,
    **options: Any,
) -> None:
    """Each sequence has the bits of a call of its own in the form ``alone`` (dq where its order is
    fixed), and is within the bounds of float64, where its numbers are finite; bytes are those predicted.
    """
    lengths = Lengths(tuple(p.seqlen_q for p in sequences), tuple(p.seqlen_k for p in sequences))
    first, backend = sequences[0], backend or HostBackend()
    data = {name: np.concatenate([p.data[name] for p in sequences], axis=2) for name in first.data}
    joined = Problem(
        heads=first.heads,
        kv_heads=first.kv_heads,
        seqlen_q=lengths.total_q,
        seqlen_k=lengths.total_k,
        head_dim=first.head_dim,
        dtype=first.dtype,
        causal=first.causal,
        scale=first.scale,
        with_dlse=first.with_dlse,
        data=data,
    )
    got = launch(joined, form, passes, backend=backend, lengths=lengths, **options)
    assert Traffic(backend.traffic).kernels == predicted(joined, form, passes, lengths=lengths, **options).kernels
    ends = zip(accumulate(lengths.queries), accumulate(lengths.keys), strict=True)
    for p, (end_q, end_k) in zip(sequences, ends, strict=True):
        rows, keys = slice(end_q - p.seqlen_q, end_q), slice(end_k - p.seqlen_k, end_k)
        mine = {name: values[:, :, keys if name in ("dk", "dv") else rows] for name, values in got.items()}
        if not p.seqlen_q or not p.seqlen_k:
            assert np.isneginf(mine.pop("lse")).all()
            assert not any(values.any() for values in mine.values())
            continue
        if not all(np.isfinite(values).all() for values in p.data.values()):
            continue  # which of the bits of not a number come out is no promise
        want = launch(p, alone, passes, **options)
        one_tile = isinstance(form, BackwardForm) and p.seqlen_k <= form.tile.block_n
        for name, values in mine.items():
            if name != "dq" or options.get("deterministic") or one_tile:
                np.testing.assert_array_equal(values, want[name], err_msg=name)
        check(p, mine)


# ---- mistakes -----------------------------------------------------------------------------------


def changed_source(kernel: Kernel, *changes: tuple[str, str], header: str = "") -> Kernel:
    """The kernel with pieces of its text replaced; ``header`` is the text of ``forward_sm90.cuh``, to be
    changed with it."""
    text = kernel.text()
    if header:
        text = text.replace('#include "forward_sm90.cuh"', header.replace("#pragma once", ""))
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return Kernel(text, kernel.entry, kernel.macros, kernel.threads)
