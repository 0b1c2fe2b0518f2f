"""A launch as the simulator takes it: tensors, blocks in launch order, and what each step moves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from analysis import native
from analysis.l2 import kept
from analysis.l2.machine import L2, LINE_BYTES, SECTOR_BYTES, Pace

SOURCE = Path(__file__).with_name("simulate.c")
READ, WRITE, ATOMIC = 0, 1, 2
#: Start addresses of tensors, as allocators give them.
ALIGNMENT = 512
#: Columns of the tables below.
BLOCK = ("start", "steps", "direction", "list", "stream", "streams", "before", "befores", "after", "afters")
STREAM = ("first", "tile_bytes", "head_bytes", "tiles", "kind", "tensor", "when")
#: When a stream moves its tile, by whether the block visits it for the first or the last time;
#: a list of tiles says which in these bits of its entries.
ALWAYS, FIRST, NOT_FIRST, LAST, NOT_LAST = range(5)
FIRST_BIT, LAST_BIT = 1 << 40, 1 << 41
RANGE = ("first", "end", "kind", "tensor")
#: Effort: block steps and line accesses that are simulated; more means bursts and fewer sets.
MOST_STEPS, MOST_ACCESSES = 300_000, 2_000_000
LEAST_SETS, LEAST_STEPS_A_WALK = 16, 128
#: Line accesses of a launch whose result is worth a file: some 10 ms of simulation.
LEAST_KEPT = 200_000

COUNTED = ("fetched", "written", "left", "touched")

Table = npt.NDArray[np.int64]


class UnavailableError(RuntimeError):
    """There is no C compiler, so nothing can be simulated here."""


@dataclass
class Launch:
    """Blocks in launch order over tensors that lie one after another.

    blocks, streams, ranges: tables with the columns BLOCK, STREAM and RANGE. A block moves its
    ``before`` ranges, then in each step a tile of each of its streams, then its ``after`` ranges.
    tiles: the tile of each step for blocks whose ``list`` is not negative, with FIRST_BIT and
    LAST_BIT where a stream's ``when`` asks for them.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    blocks: Table = field(default_factory=lambda: np.zeros((0, len(BLOCK)), np.int64))
    streams: Table = field(default_factory=lambda: np.zeros((0, len(STREAM)), np.int64))
    ranges: Table = field(default_factory=lambda: np.zeros((0, len(RANGE)), np.int64))
    tiles: Table = field(default_factory=lambda: np.zeros(0, np.int64))

    def tensor(self, name: str, nbytes: int) -> tuple[int, int]:
        """Place a tensor; returns its number and its address."""
        if name in self.sizes:
            raise ValueError(f"tensor {name!r} is there already")
        address = self.nbytes
        self.sizes[name] = nbytes
        return len(self.sizes) - 1, address

    @property
    def nbytes(self) -> int:
        """Bytes of the address space."""
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes.values())

    @property
    def accesses(self) -> int:
        """Lines that all blocks ask for."""
        column = {name: i for i, name in enumerate(BLOCK)}
        if not len(self.blocks):
            return 0
        lines = -(-self.streams[:, STREAM.index("tile_bytes")] // LINE_BYTES)
        summed = np.concatenate([[0], np.cumsum(lines)])
        first = self.blocks[:, column["stream"]]
        a_step = summed[first + self.blocks[:, column["streams"]]] - summed[first]
        return int((a_step * self.blocks[:, column["steps"]]).sum()) + self.nbytes // LINE_BYTES


@dataclass(frozen=True)
class Count:
    """Bytes of one tensor, of the lines that were simulated.

    touched: distinct bytes that blocks asked for. left: dirty in L2 when the launch ends.
    """

    fetched: int
    written: int
    left: int
    touched: int

    @property
    def fetches(self) -> float:
        """How often a byte comes from HBM."""
        return self.fetched / self.touched if self.touched else 1.0

    @property
    def writes(self) -> float:
        """How often a byte goes to HBM, at last."""
        return (self.written + self.left) / self.touched if self.touched else 1.0


class _Count(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in COUNTED]


class _Launch(ctypes.Structure):
    """``Launch`` of simulate.c, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("partitions", "sets", "sampled_sets", "ways")),
        *((name, ctypes.c_int64) for name in ("lines", "tensors", "sms", "slots")),
        *((name, ctypes.c_int64) for name in ("fixed", "burst", "blocks")),
        ("lone_speedup", ctypes.c_double),
        ("older_share", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("pace", "side", "block", "stream", "range")),
        ("tiles", ctypes.c_void_p),
    ]


def available() -> bool:
    """Whether launches can be simulated here."""
    return native.library(SOURCE) is not None


def simulate(
    launch: Launch,
    l2: L2,
    sms: int,
    blocks_per_sm: int = 1,
    pace: Pace | None = None,
    *,
    fixed: bool = False,
    sampled_sets: int | None = None,
    burst: int | None = None,
) -> dict[str, Count]:
    """Run the launch through an empty L2; counts by tensor.

    fixed: slots take their blocks in turn (slot s the blocks s, s + slots, ...), as a persistent
    kernel with a static schedule does; by default the next block starts where one has ended.
    sampled_sets, burst: sets simulated and tiles moved at a time; chosen by effort if not given.

    Raises UnavailableError where there is no C compiler.
    """
    if min(sms, blocks_per_sm) < 1:
        raise ValueError(f"sms={sms}, blocks_per_sm={blocks_per_sm}: both must be at least 1")
    filled = _filled(launch, l2, sms, blocks_per_sm, pace or Pace(), fixed, sampled_sets, burst)
    finished = ctypes.c_double()
    last = (ctypes.byref(finished),)
    if launch.accesses < LEAST_KEPT:
        return _named(launch, _counts(launch, filled, "simulate", last))
    key = _key(*filled)
    table = kept.find(key, len(launch.sizes), len(COUNTED))
    if table is None:
        table = _counts(launch, filled, "simulate", last)
        kept.keep(key, table)
    return _named(launch, table)


def replay(
    launch: Launch, l2: L2, sms: int, events: Sequence[tuple[int, int, int]] | Table, *, sampled_sets: int | None = None
) -> dict[str, Count]:
    """Run a recorded order through an empty L2: rows of (SM, block, step) in order of time.

    Step -1 stands for what a block moves before its first step, -2 for what it moves last.
    sampled_sets: sets simulated, by default all.
    """
    table = np.ascontiguousarray(np.asarray(events, np.int64).reshape(-1, 3).T)
    for name, row, limit in (("SM", 0, sms), ("block", 1, len(launch.blocks))):
        wrong = table[row][(table[row] < 0) | (table[row] >= limit)]
        if len(wrong):
            raise ValueError(f"{name} {wrong[0]} is none of the {limit}")
    steps = launch.blocks[table[1], BLOCK.index("steps")]
    wrong = table[2][(table[2] < -2) | (table[2] >= steps)]
    if len(wrong):
        raise ValueError(f"step {wrong[0]} is none of its block's")
    filled = _filled(launch, l2, sms, 1, Pace(), False, sampled_sets or l2.sets, 1)
    pointers = [ctypes.c_void_p(row.ctypes.data) for row in table]
    first = (ctypes.c_int64(table.shape[1]), *pointers)
    return _named(launch, _counts(launch, filled, "replay", (), first))


def _filled(
    launch: Launch, l2: L2, sms: int, slots: int, pace: Pace, fixed: bool, sampled_sets: int | None, burst: int | None
) -> tuple[_Launch, list[npt.NDArray[np.generic]]]:
    if sampled_sets is None:
        share = MOST_ACCESSES / max(1, launch.accesses)
        sampled_sets = min(l2.sets, max(LEAST_SETS, int(l2.sets * share)))
    if not 1 <= sampled_sets <= l2.sets:
        raise ValueError(f"sampled_sets={sampled_sets} is outside 1..{l2.sets}")
    if burst is None:
        steps = launch.blocks[:, BLOCK.index("steps")]
        longest = int(steps.max(initial=1))
        burst = min(-(-int(steps.sum()) // MOST_STEPS), max(1, longest // LEAST_STEPS_A_WALK))
    draw = np.random.default_rng(pace.seed).uniform(-1, 1, sms)
    arrays: list[npt.NDArray[np.generic]] = [
        1 + pace.spread * draw,
        np.arange(sms, dtype=np.int64) % l2.partitions,
        *(np.ascontiguousarray(t) for t in (launch.blocks, launch.streams, launch.ranges)),
        np.ascontiguousarray(launch.tiles),
    ]
    filled = _Launch(
        l2.partitions,
        l2.sets,
        sampled_sets,
        l2.ways,
        -(-launch.nbytes // LINE_BYTES),
        len(launch.sizes),
        sms,
        slots,
        int(fixed),
        burst,
        len(launch.blocks),
        pace.lone_speedup,
        pace.older_share or 0.0,
        *(array.ctypes.data for array in arrays),
    )
    return filled, arrays


def _key(filled: _Launch, arrays: list[npt.NDArray[np.generic]]) -> str:
    """Of all that a simulation follows from: the compiled simulator, numbers and tables."""
    kinds = dict(field[:2] for field in _Launch._fields_)
    numbers = [getattr(filled, name) for name in kinds if kinds[name] is not ctypes.c_void_p]
    library = _library()
    made_by = f"{Path(library._name).parent.name} {numbers}"
    return kept.digest([made_by.encode(), *(array.tobytes() for array in arrays)])


def _library() -> ctypes.CDLL:
    library = native.library(SOURCE)
    if library is None:
        raise UnavailableError("no C compiler found (cc or gcc, or set CC), so no simulated L2")
    return library


def _counts(
    launch: Launch,
    filled: tuple[_Launch, list[npt.NDArray[np.generic]]],
    entry: str,
    last: tuple[object, ...],
    first: tuple[object, ...] = (),
) -> list[list[int]]:
    """Sectors: a row for each tensor, with the columns COUNTED."""
    counts = (_Count * len(launch.sizes))()
    if getattr(_library(), entry)(ctypes.byref(filled[0]), *first, counts, *last):
        raise MemoryError(f"no memory for the index of {filled[0].lines} lines")
    return [[getattr(count, field) for field in COUNTED] for count in counts]


def _named(launch: Launch, table: list[list[int]]) -> dict[str, Count]:
    """Bytes by tensor."""
    return {
        name: Count(*(SECTOR_BYTES * sectors for sectors in row)) for name, row in zip(launch.sizes, table, strict=True)
    }
