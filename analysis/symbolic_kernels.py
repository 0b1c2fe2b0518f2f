"""One attention pass kernel by kernel, in SymPy: the work that a time bound is made of.

``analysis.symbolic_costs`` has the bytes of a whole pass. Kernels run one after another and each
has a ceiling of its own, so a bound needs them apart: bytes at the SM boundary and in HBM, FLOPs,
exponentials and thread blocks of each. No byte is added up here: the sums of ``analysis.sums`` are
given symbols (``analysis.symbolic_loop``), for any mask.

The symbols are those of ``analysis.symbolic_costs``; d is the padded head dimension there. The
report prints its calculator from this; tests hold it to the sums for numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import sympy as sp

from analysis import algorithms, memory, symbolic_loop
from analysis import symbolic_costs as costs
from analysis.algorithms import Family
from analysis.flops import products
from analysis.hbm import compulsory_hbm, tensor_bytes
from analysis.shapes import AttentionShape
from analysis.sums.copies import OPERANDS
from analysis.sums.flash_sm90 import COUNTER_BYTES
from analysis.symbolic import STATISTIC, Br, Nk, Nq, d, e
from analysis.symbolic_costs import KEY, KEY_TILES, QUERY, QUERY_TILES, B, Entries, H, Hk
from analysis.symbolic_loop import Symbols
from analysis.time_model import blocks_alike
from analysis.traffic import Traffic, sum_of

C, D = sp.symbols("C D", positive=True)
"""Columns of a tile, which products run over; the head dimension as asked for."""
TANH = sp.symbols("tanh", nonnegative=True)
"""``analysis.flops.TANH_SPECIALS`` where scores are capped, else 0."""
HOPPER, PERSISTENT = "flash-sm90", "flash-sm90 persistent"
ALGORITHMS = (*costs.ALGORITHMS, HOPPER, PERSISTENT)
"""Those with closed forms, and the Hopper kernels with either kind of forward."""

_SIZES: dict[str, sp.Expr] = tensor_bytes(symbolic_loop.shape())
_MAIN = {
    ("standard", "forward"): "standard_output", ("standard", "backward"): "standard_dk",
    (HOPPER, "forward"): "flash_forward_sm90", (HOPPER, "backward"): "flash_backward_sm90",
    (PERSISTENT, "forward"): "flash_forward_sm90_persistent",
    (PERSISTENT, "backward"): "flash_backward_sm90",
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """What one kernel does, whole batch.

    blocks: thread blocks of a kernel whose time depends on how they fill the SMs; None of others.
    alike: whether these do the same under a mask too (``analysis.time_model.blocks_alike``).
    """

    name: str
    moved: Entries
    hbm_read: sp.Expr
    hbm_write: sp.Expr
    flops: sp.Expr = sp.S.Zero
    exponentials: sp.Expr = sp.S.Zero
    blocks: sp.Expr | None = None
    alike: bool = False
    main: bool = False


@dataclass(frozen=True)
class Options:
    """What is done to scores, and what it leaves of them.

    bias: a stored bias with its gradient, one of ``BIASES`` or "".
    partial: a mask leaves pairs that no tile visits; only the gradient of a bias asks.
    """

    alibi: bool = False
    bias: str = ""
    partial: bool = False


PLAIN = Options()
BIASES: dict[str, tuple[sp.Expr, sp.Expr]] = {
    "full": (B, H), "heads": (sp.S.One, H), "items": (B, sp.S.One), "one": (sp.S.One, sp.S.One),
}  # fmt: skip
"""(items, heads) of a bias, each 1 or as many as there are; only "full" if it is both."""


def kernels(algorithm: str, pass_: str, options: Options = PLAIN) -> list[Kernel]:
    """The kernels of a pass of one of ``ALGORITHMS``, without copies."""
    main, found = _main_of(algorithm, pass_), []
    moved = _moved(algorithm, pass_, options)
    shape = symbolic_loop.shape(grouped=_grouped(algorithm))
    bias = BIASES.get(options.bias)
    once = compulsory_hbm(cast(Traffic, _Moved(moved)), shape, cast(Any, bias), Symbols)
    for name, entries in moved.items():
        flops, exponentials, blocks = _work(algorithm, pass_, name, entries)
        read, write = (sp.Add(*side[name].values()) for side in (once.reads, once.writes))
        alike = blocks_alike(algorithm.split()[0])
        found.append(
            Kernel(name, entries, read, write, flops, exponentials, blocks, alike, name == main)
        )
    return found


@dataclass(frozen=True)
class _Moved:
    """``analysis.traffic.Traffic`` in symbols."""

    kernels: dict[str, Entries]


def _moved(algorithm: str, pass_: str, options: Options) -> dict[str, Entries]:
    """What ``analysis.sums`` add up for symbols."""
    name, _, form = algorithm.partition(" ")
    bytes_of, variant = sum_of(algorithms.find(name), pass_)
    asked: dict[str, Any] = dict(variant)
    if form and pass_ == "forward":
        asked["persistent"] = True
    if options.alibi:
        asked["alibi"] = True
    if options.bias:
        asked["bias"] = BIASES[options.bias]
        if pass_ == "backward":
            asked["bias_gradient"] = True
    shape = symbolic_loop.shape(grouped=_grouped(algorithm), partial=options.partial)
    found: Any = bytes_of(shape, symbolic_loop.TILE, **asked)
    return {
        kernel: {key: sp.factor_terms(sp.sympify(n)) for key, n in entries.items() if n != 0}
        for kernel, entries in found.items()
    }


def _grouped(algorithm: str) -> bool:
    return algorithms.find(algorithm.split()[0]).grouped_heads


def bias_bytes(bias: str) -> sp.Expr:
    """Of a stored bias, or of its gradient."""
    items, heads = BIASES[bias]
    return items * heads * Nq * Nk * e


def copies(pass_: str) -> Entries:
    """What the copies around kernels move where D is no multiple of 8
    (``analysis.sums.copies``)."""
    reads, writes = OPERANDS[pass_]
    entries = {}
    for name in (*reads, *writes):
        entries[name, "read"] = _SIZES[name].subs(d, D)
        entries[name, "write"] = _SIZES[name].subs(d, d if name in reads else D)
    return entries


def saved_bytes(algorithm: str, bias: str = "") -> sp.Expr:
    """What lies between forward and backward."""
    name = algorithm if algorithm in costs.ALGORITHMS else "flash"  # the same tensors
    return costs.saved_bytes(name) + (bias_bytes(bias) if bias else 0)


def peak_bytes(algorithm: str, pass_: str, bias: str = "") -> sp.Expr:
    """What is alive at the worst moment, all rows padded; whole query tiles of scratch on
    Hopper."""
    if bias:
        peak = peak_bytes(algorithm, pass_) + bias_bytes(bias)
        if pass_ == "forward":
            return peak
        if bias == "full":  # written as it is, without a sum in fp32
            return peak + bias_bytes(bias)
        ordered = algorithms.find(algorithm).deterministic
        items, heads = (B, H) if ordered else BIASES[bias]
        return peak + bias_bytes(bias) + items * heads * Nq * Nk * STATISTIC
    if algorithm not in (HOPPER, PERSISTENT):
        return costs.peak_bytes(algorithm, pass_)
    if pass_ == "forward":
        scratch = COUNTER_BYTES if algorithm == PERSISTENT else 0
        return costs.peak_bytes("flash", "forward") + scratch
    rows = B * H * QUERY_TILES * Br * STATISTIC
    return costs.saved_bytes("flash") + 2 * QUERY + 2 * KEY + rows * (2 + d)


def given_bytes(algorithm: str, pass_: str) -> sp.Expr:
    """The caller's tensors that are alive at the peak beside their padded copies."""
    reads, writes = OPERANDS[pass_]
    names = {*reads, *writes}
    if (algorithm, pass_) == ("standard", "backward"):  # whose peak is before dq and dk are made
        any_shape = AttentionShape(1, 1, 1, 1, 8)
        names &= {tensor.name for tensor in memory.standard_backward_peak(any_shape)}
    return sp.Add(*[_SIZES[name].subs(d, D) for name in sorted(names)])


def _main_of(algorithm: str, pass_: str) -> str:
    stem = "flash1" if algorithms.find(algorithm.split()[0]).family is Family.FLASH1 else "flash"
    return _MAIN.get((algorithm, pass_), f"{stem}_{pass_}")


def _work(
    algorithm: str, pass_: str, kernel: str, moved: Entries
) -> tuple[sp.Expr, sp.Expr, sp.Expr | None]:
    """FLOPs, exponentials and blocks."""
    zero = sp.Integer(0)
    if algorithm == "standard":
        if not {tensor for tensor, _ in moved} - {"s", "p", "dp", "ds"}:
            return zero, B * H * Nq * Nk if kernel == "standard_softmax" else zero, None
        written = {tensor for tensor, direction in moved if direction == "write"}
        tiles = QUERY_TILES
        if written & {"s", "dp"}:
            tiles = QUERY_TILES * KEY_TILES
        elif written & {"dk", "dv"}:
            tiles = KEY_TILES
        return 2 * B * H * Nq * Nk * C, zero, B * H * tiles
    if kernel != _main_of(algorithm, pass_):
        return zero, zero, None
    if algorithms.find(algorithm.split()[0]).family is Family.FLASH1:
        blocks = B * H
    else:
        blocks = B * H * QUERY_TILES if pass_ == "forward" else B * Hk * KEY_TILES
    flops = products(pass_, recompute=True) * 2 * B * H * costs.P * C
    return flops, costs.exponentials(algorithm, pass_, TANH), blocks
