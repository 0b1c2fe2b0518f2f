"""Drawn programs of barriers and masked words, as CUDA and as a model of CUDA's rules.

Every thread has one number v.  A word waits for the lanes of its mask that have not ended, a barrier
for all threads of the block that have not; what a lane that did not come would have given has all
bits set.  Where nobody can go on the program is wrong, and the host must say so.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.host import HostBackend, KernelError
from kernels.launch import Kernel, from_numpy

ALL = 0xFFFFFFFF
WARP = 32
SHUFFLES = ("__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync")
VOTES = ("__all_sync", "__any_sync", "__ballot_sync")


@dataclass(frozen=True)
class Mask:
    """Of the lanes `lanes`, those in a lane's own group of `size`."""

    size: int
    lanes: int

    def at(self, lane: int) -> int:
        return ((1 << self.size) - 1) << (lane & ~(self.size - 1)) & self.lanes

    def __str__(self) -> str:
        return f"({(1 << self.size) - 1:#x}u << (lane & {WARP - self.size}) & {self.lanes:#x}u)"


@dataclass(frozen=True)
class Word:
    """A shuffle or a vote.  by: lane, distance, or lanes that vote yes."""

    name: str
    mask: Mask
    by: int
    width: int = WARP


@dataclass(frozen=True)
class Exchange:
    """Through shared memory, between two __syncwarp."""

    mask: Mask


@dataclass(frozen=True)
class Barrier:
    pass


@dataclass(frozen=True)
class Branch:
    """lanes, warps: who takes the first way."""

    lanes: int
    warps: int
    first: tuple[Any, ...]
    second: tuple[Any, ...]


@dataclass(frozen=True)
class Loop:
    """uneven: odd lanes go round once more."""

    count: int
    uneven: bool
    body: tuple[Any, ...]


@dataclass(frozen=True)
class End:
    pass


@dataclass(frozen=True)
class Case:
    warps: int
    program: tuple[Any, ...]
    seed: int | None


# -- as CUDA ---------------------------------------------------------------------------------------


def source_of(case: Case) -> str:
    lines = [
        '#include "counted.cuh"',
        'extern "C" __global__ void drawn(Global<uint32> y) {',
        "const int t = threadIdx.x, lane = t % 32, warp = t / 32;",
        "Shared<uint32> s = dynamic_shared<uint32>();",
        "uint32 v = t * 2654435761u;",
    ]
    return "\n".join([*lines, *_lines(case.program), "y[t] = v;", "}", ""])


def _lines(program: Sequence[Any]) -> Iterator[str]:
    for step in program:
        match step:
            case Word(name, mask, by, width) if name in SHUFFLES:
                yield f"v = 3u * v + {name}({mask}, v, {by}, {width});"
            case Word(name, mask, by, _):
                yield f"v = 3u * v + {name}({mask}, (v ^ {by:#x}u >> lane) & 1u);"
            case Exchange(mask):
                yield f"s[t] = v; __syncwarp({mask});"
                yield f"{{ const uint32 other = s[{mask} >> (lane ^ 1) & 1u ? t ^ 1 : t];"
                yield f"__syncwarp({mask}); v = 3u * v + other; }}"
            case Barrier():
                yield "__syncthreads();"
            case Branch(lanes, warps, first, second):
                yield f"if ({lanes:#x}u >> lane & {warps:#x}u >> warp & 1u) {{"
                yield from _lines(first)
                yield "} else {"
                yield from _lines(second)
                yield "}"
            case Loop(count, uneven, body):
                yield f"for (int k = 0; k < {count}{' + lane % 2' if uneven else ''}; ++k) {{"
                yield from _lines(body)
                yield "}"
            case End():
                yield "y[t] = v; return;"


# -- as a model ------------------------------------------------------------------------------------

#: What a thread waits in: ("barrier", place) or (word, mask, what it brings).
Wait = tuple[Any, ...]


class _EndedError(Exception):
    """Ends a thread."""


def _thread(t: int, program: Sequence[Any], v: list[int]) -> Generator[Wait, dict[int, int], None]:
    lane, warp = t % WARP, t // WARP
    for step in program:
        match step:
            case Word(name, mask, by, width) if name in SHUFFLES:
                brought = yield name, mask.at(lane), v[t]
                v[t] = (3 * v[t] + brought.get(_taken_from(name, lane, by, width), ALL)) & ALL
            case Word(name, mask, by, _):
                brought = yield name, mask.at(lane), (v[t] ^ by >> lane) & 1
                v[t] = (3 * v[t] + _vote(name, brought)) & ALL
            case Exchange(mask):
                brought = yield "__syncwarp", mask.at(lane), v[t]
                other = lane ^ 1 if mask.at(lane) >> (lane ^ 1) & 1 else lane
                mine = yield "__syncwarp", mask.at(lane), v[t]
                assert lane in mine
                v[t] = (3 * v[t] + brought[other]) & ALL
            case Barrier():
                yield "barrier", id(step)
            case Branch(lanes, warps, first, second):
                yield from _thread(t, first if lanes >> lane & warps >> warp & 1 else second, v)
            case Loop(count, uneven, body):
                for _ in range(count + (lane % 2 if uneven else 0)):
                    yield from _thread(t, body, v)
            case End():
                raise _EndedError


def _taken_from(name: str, lane: int, by: int, width: int) -> int:
    first = lane & ~(width - 1)
    if name == "__shfl_sync":
        return first + by % width
    if name == "__shfl_up_sync":
        return lane - by if lane - by >= first else lane
    if name == "__shfl_down_sync":
        return lane + by if lane + by < first + width else lane
    return lane ^ by if lane ^ by < first + width else lane


def _vote(name: str, brought: dict[int, int]) -> int:
    if name == "__ballot_sync":
        return sum(1 << lane for lane, yes in brought.items() if yes)
    return int(all(brought.values()) if name == "__all_sync" else any(brought.values()))


def expected(case: Case) -> np.ndarray | str:
    """v of each thread at its end, or how the host must call what is wrong."""
    count = WARP * case.warps
    v = [t * 2654435761 & ALL for t in range(count)]
    runs = {t: _thread(t, case.program, v) for t in range(count)}
    waits: dict[int, Wait] = {}

    def go_on(t: int, brought: dict[int, int] | None) -> bool:
        """Whether its next word is right by itself."""
        waits.pop(t, None)
        try:
            waits[t] = runs[t].send(brought)
        except (StopIteration, _EndedError):
            del runs[t]
            return True
        return waits[t][0] == "barrier" or bool(waits[t][1] >> t % WARP & 1)

    ready: list[tuple[int, dict[int, int] | None]] = [(t, None) for t in range(count)]
    while ready:
        right = [go_on(t, brought) for t, brought in ready]
        if not all(right):
            return "divergence"
        ready = [pair for t in waits for pair in _together(t, waits, runs.keys())]
        ready = list({t: (t, brought) for t, brought in ready}.values())
    if not runs:
        return np.array(v, np.uint32)
    return "divergence" if len({w[1] for w in waits.values() if w[0] == "barrier"}) > 1 else "deadlock"


def _together(t: int, waits: dict[int, Wait], alive: Any) -> list[tuple[int, dict[int, int]]]:
    """The threads that go on together with t, and what they brought; none where some are missing."""
    wait = waits[t]
    if wait[0] == "barrier":
        return [(other, {}) for other in alive] if all(waits.get(o) == wait for o in alive) else []
    first = t - t % WARP
    lanes = [lane for lane in range(WARP) if wait[1] >> lane & 1 and first + lane in alive]
    if any(waits.get(first + lane, ("", 0))[:2] != wait[:2] for lane in lanes):
        return []
    brought = {lane: waits[first + lane][2] for lane in lanes}
    return [(first + lane, brought) for lane in lanes]


def failure(case: Case) -> str | None:
    """Where the host and the model differ, or None."""
    count, wanted = WARP * case.warps, expected(case)
    y = np.zeros(count, np.uint32)
    kernel = Kernel(source_of(case), "drawn", (), count)
    try:
        HostBackend(seed=case.seed).launch(kernel, (1, 1, 1), 4 * count, [from_numpy("y", y, "w")])
    except KernelError as error:
        if isinstance(wanted, str):
            return None if error.kind == wanted else f"{wanted} expected, {error}"
        return f"right, but the host says {error}"
    if isinstance(wanted, str):
        return f"{wanted} expected, and the host ran on"
    differ = np.flatnonzero(y != wanted)
    return f"threads {differ.tolist()} have other values" if differ.size else None
