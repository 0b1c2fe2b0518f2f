"""One attention pass kernel by kernel, in SymPy: the work that a time bound is made of.

``analysis.symbolic_costs`` has the bytes of a whole pass. Kernels run one after another and each
has a ceiling of its own, so a bound needs them apart: bytes at the SM boundary and in HBM, FLOPs,
exponentials and thread blocks of each. Beside the algorithms with closed forms there are the Hopper
kernels, whose row statistics and fp32 dq lie in whole query tiles, and the copies around kernels
whose rows are padded.

The symbols are those of ``analysis.symbolic_costs``; d is the padded head dimension there. Causal
forms need N_k >= N_q. The report prints its calculator from this; tests hold it to the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy as sp

from analysis import algorithms, memory
from analysis import symbolic_costs as costs
from analysis.algorithms import Family
from analysis.flops import products
from analysis.shapes import AttentionShape
from analysis.sums.copies import OPERANDS
from analysis.sums.flash_sm90 import COUNTER_BYTES
from analysis.symbolic import STATISTIC, Br, Nk, Nq, V, d, e
from analysis.symbolic_costs import (
    ACCUMULATOR,
    KEY,
    KEY_TILES,
    QUERY,
    QUERY_TILES,
    ROW,
    SCORES,
    B,
    Entries,
    H,
    Hk,
    Rq,
)

C, D = sp.symbols("C D", positive=True)
"""Columns of a tile, which products run over; the head dimension as asked for."""
HOPPER, PERSISTENT = "flash-sm90", "flash-sm90 persistent"
ALGORITHMS = (*costs.ALGORITHMS, HOPPER, PERSISTENT)
"""Those with closed forms, and the Hopper kernels with either kind of forward."""

_SIZES = {
    **dict.fromkeys(("q", "out", "dout", "dq"), QUERY),
    **dict.fromkeys(("k", "v", "dk", "dv"), KEY),
    **dict.fromkeys(("s", "p", "dp", "ds"), SCORES),
    **dict.fromkeys(("lse", "lse2", "delta", "m", "l"), ROW),
    **dict.fromkeys(("dq_accum", "out_tmp", "dq_tmp"), ACCUMULATOR),
    "tile_counter": sp.Integer(COUNTER_BYTES),
}
_PREPROCESS = {("out", "read"): QUERY, ("dout", "read"): QUERY, ("delta", "write"): ROW}
# What the products of standard attention move of K and V, and of Q and dO.
_KEYS_MOVED = QUERY_TILES * B * H * Nk * d * e
_QUERIES_OF_KEY_TILES = KEY_TILES * QUERY

#: Kernels around the one that walks the tile loop; that one moves the rest of the pass.
_AROUND: dict[tuple[str, str], dict[str, Entries]] = {
    ("flash", "backward"): {
        "flash_backward_preprocess": {**_PREPROCESS, ("dq_accum", "write"): ACCUMULATOR},
        "flash_backward_postprocess": {
            ("dq_accum", "read"): ACCUMULATOR, ("dq", "write"): QUERY,
        },
    },
    ("flash-deterministic", "backward"): {
        "flash_backward_preprocess": _PREPROCESS,
        "flash_backward_postprocess": {
            ("dq_accum", "read"): B * H * Rq * d * STATISTIC, ("dq", "write"): QUERY,
        },
    },
    ("flash1-literal", "forward"): {
        "flash1_init": {("out", "write"): QUERY, ("l", "write"): ROW, ("m", "write"): ROW},
    },
    ("flash1-literal", "backward"): {"flash1_backward_init": {("dq", "write"): QUERY}},
    ("standard", "forward"): {
        "standard_scores": {
            ("q", "read"): _QUERIES_OF_KEY_TILES, ("k", "read"): _KEYS_MOVED,
            ("s", "write"): SCORES,
        },
        "standard_softmax": {("s", "read"): SCORES, ("p", "write"): SCORES},
    },
    ("standard", "backward"): {
        "standard_dv": {
            ("p", "read"): SCORES, ("dout", "read"): _QUERIES_OF_KEY_TILES, ("dv", "write"): KEY,
        },
        "standard_dp": {
            ("dout", "read"): _QUERIES_OF_KEY_TILES, ("v", "read"): _KEYS_MOVED,
            ("dp", "write"): SCORES,
        },
        "standard_softmax_backward": {
            ("p", "read"): SCORES, ("dp", "read"): SCORES, ("ds", "write"): SCORES,
        },
        "standard_dq": {
            ("ds", "read"): SCORES, ("k", "read"): _KEYS_MOVED, ("dq", "write"): QUERY,
        },
    },
}  # fmt: skip
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
    """

    name: str
    moved: Entries
    hbm_read: sp.Expr
    hbm_write: sp.Expr
    flops: sp.Expr = sp.S.Zero
    exponentials: sp.Expr = sp.S.Zero
    blocks: sp.Expr | None = None
    main: bool = False


def kernels(algorithm: str, pass_: str) -> list[Kernel]:
    """The kernels of a pass of one of ``ALGORITHMS``, without copies."""
    main, found = _main_of(algorithm, pass_), []
    for name, moved in _entries(algorithm, pass_).items():
        read, write = _once(moved)
        flops, exponentials, blocks = _work(algorithm, pass_, name, moved)
        found.append(Kernel(name, moved, read, write, flops, exponentials, blocks, name == main))
    return found


def copies(pass_: str) -> Entries:
    """What the copies around kernels move where D is no multiple of 8
    (``analysis.sums.copies``)."""
    reads, writes = OPERANDS[pass_]
    entries = {}
    for name in (*reads, *writes):
        entries[name, "read"] = _SIZES[name].subs(d, D)
        entries[name, "write"] = _SIZES[name].subs(d, d if name in reads else D)
    return entries


def peak_bytes(algorithm: str, pass_: str) -> sp.Expr:
    """What is alive at the worst moment, all rows padded; whole query tiles of scratch on
    Hopper."""
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


def _entries(algorithm: str, pass_: str) -> dict[str, Entries]:
    if algorithm in (HOPPER, PERSISTENT):
        return _hopper(pass_, algorithm == PERSISTENT)
    around = _AROUND.get((algorithm, pass_), {})
    rest: Entries = {}
    for key, whole in costs.traffic(algorithm, pass_).items():
        left = sp.expand(whole - sum(part.get(key, 0) for part in around.values()))
        if left != 0:
            rest[key] = sp.factor_terms(left)
    return {**around, _main_of(algorithm, pass_): rest}


def _hopper(pass_: str, persistent: bool) -> dict[str, Entries]:
    """``analysis.sums.flash_sm90``."""
    if pass_ == "forward":
        moved = costs.traffic("flash", "forward")
        if not persistent:
            return {_MAIN[HOPPER, "forward"]: moved}
        asked = B * H * QUERY_TILES * COUNTER_BYTES
        counter = {("tile_counter", "write"): sp.Integer(COUNTER_BYTES)}
        return {
            "flash_forward_sm90_clear_counter": counter,
            _MAIN[PERSISTENT, "forward"]: {**moved, ("tile_counter", "atomic"): asked},
        }
    rows, visits = B * H * QUERY_TILES * Br * STATISTIC, B * H * V * Br * STATISTIC
    main = costs.traffic("flash", "backward")
    once = {key: main[key] for key in (("k", "read"), ("v", "read"), ("dk", "write"),
                                       ("dv", "write"), ("q", "read"))}  # fmt: skip
    return {
        "flash_backward_sm90_preprocess": {
            ("out", "read"): QUERY, ("dout", "read"): QUERY, ("lse", "read"): ROW,
            ("lse2", "write"): rows, ("delta", "write"): rows, ("dq_accum", "write"): rows * d,
        },
        "flash_backward_sm90": {
            **once, ("dout", "read"): once["q", "read"], ("lse2", "read"): visits,
            ("delta", "read"): visits, ("dq_accum", "atomic"): visits * d,
        },
        "flash_backward_sm90_postprocess": {
            ("dq_accum", "read"): rows * d, ("dq", "write"): QUERY,
        },
    }  # fmt: skip


def _once(moved: Entries) -> tuple[sp.Expr, sp.Expr]:
    """Each tensor once through HBM, as ``analysis.hbm.compulsory_hbm`` counts it."""
    read, write = sp.Integer(0), sp.Integer(0)
    plain = ("dq_accum", "write") in moved  # partial sums lie side by side
    for (tensor, direction), count in moved.items():
        once = sp.Min(count, _SIZES[tensor])
        if tensor == "dq_accum" and (plain or direction == "read"):
            once = count
        if direction != "write":
            read += once
        if direction != "read":
            write += once
    return read, write


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
    return flops, costs.exponentials(algorithm, pass_), blocks
