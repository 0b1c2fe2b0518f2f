"""Runs sm.c, compiled by ``analysis.native``."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from analysis import native
from analysis.loop_model.parameters import SM90, Parameter, Pick, TensorOrder, Unit
from analysis.loop_model.program import Program, Step

SOURCE = Path(__file__).with_name("sm.c")
LIMIT = 20_000_000
MOST_WARPS, MOST_BARRIERS, MOST_BLOCKS, MOST_AHEAD = 64, 64, 16, 4
"""Room in sm.c."""
_STEP = (
    "unit",
    "interval",
    "latency",
    "stall",
    "yields",
    "write",
    "read",
    "wait",
    "reads_even",
    "reads_odd",
    "amount",
    "from_shared",
    "last_of_group",
    "accumulates",
    "pending",
)
_RUN_PARAMETERS = (
    "tensor_tail",
    "tensor_window",
    "tensor_ahead",
    "tensor_order",
    "bank_ports",
    "tensor_register_reads",
    "shared_bytes",
    "copy_bytes",
    "copy_latency",
    "copy_far",
    "copy_issue",
    "store_latency",
    "try_wait",
    "arrive_visible",
    "barrier_port",
    "named_release",
    "jump",
    "xu_queue",
    "source_hold",
    "add_bytes",
    "pick",
)


class _CStep(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in _STEP]


class _Run(ctypes.Structure):
    _fields_ = [
        ("steps_in_table", ctypes.c_int32),
        ("table", ctypes.c_void_p),
        ("warps", ctypes.c_int32),
        ("first", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("steps", "kinds", "objects", "values")),
        ("barriers", ctypes.c_int32),
        ("arrivals", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in _RUN_PARAMETERS),
        ("seed", ctypes.c_uint32),
        ("limit", ctypes.c_int64),
        ("issued", ctypes.c_void_p),
        ("busy", ctypes.c_void_p),
        *((f"tensor_{name}", ctypes.c_void_p) for name in ("starts", "ends", "groups")),
        ("tensor_ops", ctypes.c_int64),
        ("tensor_room", ctypes.c_int64),
        ("clocks", ctypes.c_int64),
    ]


def _library() -> ctypes.CDLL:
    found = native.library(SOURCE)
    if found is None:
        raise RuntimeError("the model of an SM needs a C compiler (cc or gcc) and found none")
    return found


@dataclass(frozen=True)
class Simulated:
    """What an SM did with its thread blocks.

    clocks: from the first instruction to the last.
    issued: per warp, the clock of every instruction of its way; those of a block lie together.
    busy: clocks each unit was busy, summed over schedulers where each has its own.
    products: start, end and warpgroup of every product in the tensor cores.
    """

    clocks: int
    issued: tuple[npt.NDArray[np.int32], ...]
    busy: Mapping[str, int]
    products: npt.NDArray[np.int32]


def simulate(
    program: Program,
    *,
    tensor_order: TensorOrder = TensorOrder.ROUND_ROBIN,
    pick: Pick = Pick.OLDEST,
    start: Sequence[int] | None = None,
    seed: int = 0,
    parameters: Mapping[str, Parameter] = SM90,
    **changed: float,
) -> Simulated:
    """Runs a program. start: per warp, the clock at which it may begin.

    parameters: of the SM; those of units it does not have may be left out.
    changed: some of them with another value.

    Raises RuntimeError without a C compiler, and ValueError when no warp can go on.
    """
    numbers = {name: int(p.value) for name, p in parameters.items()}
    unknown = set(changed) - set(numbers)
    if unknown:
        raise ValueError(f"no parameter {sorted(unknown)[0]!r}; there are {', '.join(numbers)}")
    numbers |= {name: int(value) for name, value in changed.items()}
    numbers |= {"tensor_order": int(tensor_order), "pick": int(pick)}
    for what, count, most in (
        ("warps", len(program.ways), MOST_WARPS),
        ("mbarriers", len(program.arrivals), MOST_BARRIERS),
        ("products fetched ahead", numbers.get("tensor_ahead", 0), MOST_AHEAD),
        ("blocks", program.blocks, MOST_BLOCKS),
    ):
        if count > most:
            raise ValueError(f"{count} {what}, the model of an SM takes at most {most}")
    table = (_CStep * len(program.table))(*(_c_step(step) for step in program.table))
    places = {address: index for index, address in enumerate(sorted(program.arrivals))}
    counts = np.array([program.arrivals[a] for a in sorted(program.arrivals)] or [0], np.int32)
    lengths = [len(way.steps) for way in program.ways]
    first = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)

    def joined(name: str) -> npt.NDArray[np.int32]:
        return np.array([x for way in program.ways for x in getattr(way, name)], dtype=np.int32)

    steps, kinds, values = joined("steps"), joined("kinds"), joined("values")
    objects = np.array(
        [
            places.get(x, x) if k in (2, 3, 4) else x
            for way in program.ways
            for k, x in zip(way.kinds, way.objects, strict=True)
        ],
        dtype=np.int32,
    )
    starts = np.array(start or [0] * len(program.ways), np.int64)
    room = 1 << 18
    issued, busy = np.zeros(len(steps), np.int32), np.zeros(len(Unit) + 2, np.int64)
    products = np.zeros((3, room), np.int32)
    run = _Run(
        len(table),
        ctypes.cast(table, ctypes.c_void_p),
        len(program.ways),
        first.ctypes.data,
        steps.ctypes.data,
        kinds.ctypes.data,
        objects.ctypes.data,
        values.ctypes.data,
        len(program.arrivals),
        counts.ctypes.data,
        starts.ctypes.data,
        *(numbers.get(n, 0) for n in _RUN_PARAMETERS),
        seed,
        LIMIT,
        issued.ctypes.data,
        busy.ctypes.data,
        *(products[k].ctypes.data for k in range(3)),
        0,
        room,
        0,
    )
    if _library().simulate(ctypes.byref(run)):
        raise MemoryError("no memory for the model of an SM")
    if run.clocks < 0:
        raise ValueError("the warps wait for each other for ever, or longer than the limit")
    names = [unit.name for unit in Unit] + ["SHARED_PORT", "ISSUE"]
    return Simulated(
        run.clocks,
        tuple(issued[first[n] : first[n + 1]] for n in range(len(program.ways))),
        dict(zip(names, busy.tolist(), strict=True)),
        products[:, : min(run.tensor_ops, room)].copy(),
    )


def _c_step(step: Step) -> _CStep:
    o = step.operation
    return _CStep(
        o.unit,
        o.interval,
        o.latency,
        step.stall,
        step.yields,
        step.write_barrier,
        step.read_barrier,
        step.wait,
        *step.reads,
        step.amount,
        step.from_shared,
        step.last_of_group,
        step.accumulates,
        step.pending,
    )
