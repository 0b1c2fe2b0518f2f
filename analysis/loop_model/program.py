"""What the warps of one thread block do, as the model of an SM takes it.

A program has a table of the instructions that occur and, for each warp, the way it took through
them: indices into the table, and what each touched of what warps share (barriers, copies).
``kernels.sass.run`` makes one from machine code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from analysis.loop_model.parameters import Operation


class Event(IntEnum):
    """What an instruction does to what warps share; numbers as in sm.c."""

    NONE = 0
    OFF = 1  # its predicate was false: it issues and does nothing
    WAIT = 2  # for the phase of an mbarrier with a parity
    ARRIVE = 3  # at an mbarrier, expecting bytes
    COPY_IN = 4  # bytes that complete at an mbarrier
    COPY_OUT = 5  # bytes from shared memory to the L2 cache
    BARRIER_SYNC = 6  # at a named barrier of so many threads
    BARRIER_ARRIVE = 7
    JUMP = 8  # a branch that was taken
    WARP_COPY = 9  # bytes that a warp's threads copy to shared memory
    WARP_COPIES_END = 10  # the counter it writes is open until the warp's copies have come
    ADD = 11  # bytes of sectors that L2 adds to


NAMED = 16
"""Named barriers of a block."""
_AT_NAMED = (Event.BARRIER_SYNC, Event.BARRIER_ARRIVE)


@dataclass(frozen=True)
class Step:
    """One instruction of the table.

    stall, yields, write_barrier, read_barrier, wait: its control fields; -1 for no counter.
    reads: registers that the even and the odd bank of the register file have to deliver.
    operation: of the table of operations in ``parameters``.
    amount: what the operation needs to know beside: of a tensor instruction its columns, of an
        access the bytes a warp moves.
    from_shared: bytes a tensor instruction of a warpgroup reads from shared memory.
    last_of_group, accumulates: a tensor instruction closes a group; reads what it adds to.
    pending: of a wait for groups or counters, how many may be left.
    """

    text: str
    operation: Operation
    stall: int
    yields: bool = False
    write_barrier: int = -1
    read_barrier: int = -1
    wait: int = 0
    reads: tuple[int, int] = (0, 0)
    amount: int = 0
    from_shared: int = 0
    last_of_group: bool = False
    accumulates: bool = False
    pending: int = 0


@dataclass
class Way:
    """The way of one warp: for every instruction it issued the table's index, and its event."""

    warp: int
    steps: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def add(self, step: int, kind: int = 0, object_: int = 0, value: int = 0) -> None:
        self.steps.append(step)
        self.kinds.append(kind)
        self.objects.append(object_)
        self.values.append(value)


@dataclass(frozen=True)
class Program:
    """A thread block, or several on one SM: table, ways, and how many arrivals complete a phase of
    each mbarrier."""

    table: tuple[Step, ...]
    ways: tuple[Way, ...]
    arrivals: Mapping[int, int]
    blocks: int = 1


def side_by_side(program: Program, blocks: int, times: int = 1) -> Program:
    """The same block several times on one SM, each with named barriers of its own.

    times: how many blocks follow each other in each place, a warp's next as soon as it is done.

    ValueError for a program with mbarriers: blocks that use them have an SM for themselves.
    """
    if program.arrivals and blocks * times > 1:
        raise ValueError(f"{blocks * times} blocks with mbarriers on one SM are not modelled")
    ways = []
    for block in range(blocks):
        for way in program.ways:
            objects = [
                barrier + NAMED * block if kind in _AT_NAMED else barrier
                for kind, barrier in zip(way.kinds, way.objects, strict=True)
            ]
            number = len(program.ways) * block + way.warp
            parts = (way.steps, way.kinds, objects, way.values)
            ways.append(Way(number, *(part * times for part in parts)))
    return Program(program.table, tuple(ways), program.arrivals, blocks)
