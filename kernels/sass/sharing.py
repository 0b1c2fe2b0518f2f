"""What machine instructions do to what warps share: memory, barriers, copies.

The other half of ``kernels.sass.operations``, with the same kind of functions.
"""

from __future__ import annotations

from collections.abc import Mapping

from analysis.loop_model.program import Event
from kernels.sass.code import Instruction
from kernels.sass.operands import (
    BLOCKED,
    Block,
    Do,
    Mbarrier,
    NamedBarrier,
    Warp,
    address,
    is_predicate,
    predicate,
    source,
    target,
    target_predicate,
)

WORD_BYTES = 4
SECTOR = 32
"""Bytes that L2 handles at a time."""
ROWS_OF_ACCUMULATOR = 8
"""That a warp's instruction touches; a row's four lanes have every second column of a sector."""


def nothing(w: Warp) -> None:
    """No effect that is followed."""
    return None


def named_barrier(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    identity = source(operands[0], block)
    count = source(operands[1], block) if len(operands) > 1 else None
    waits = "SYNC" in i.modifiers

    def do(w: Warp) -> int | None:
        number = identity(w)
        needed = count(w) if count else block.launch.threads
        barrier = block.named.setdefault(number, NamedBarrier())
        if w.waiting_for is None:
            barrier.arrived += 32
            generation = barrier.generation
            if barrier.arrived >= needed:
                barrier.arrived = 0
                barrier.generation += 1
            if waits:
                w.waiting_for = generation
        if waits:
            if barrier.generation == w.waiting_for:
                return BLOCKED
            w.waiting_for = None
        kind = Event.BARRIER_SYNC if waits else Event.BARRIER_ARRIVE
        w.event = (int(kind), number, needed // 32)
        return None

    return do


def syncs(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    at = address(operands[1], block)
    if "EXCH" in i.modifiers:
        value = source(operands[2], block)

        def start(w: Warp) -> None:
            count = 0x100000 - (value(w) >> 1)
            block.mbarriers[at(w)] = Mbarrier(count, count)

        return start
    if "PHASECHK" in i.modifiers:
        passed, parity = target_predicate(operands[0]), source(operands[2], block)

        def wait(w: Warp) -> int | None:
            place, wanted = at(w), parity(w) >> 31
            if block.mbarriers[place].completed & 1 == wanted:
                return BLOCKED
            passed(w, True)
            w.event = (int(Event.WAIT), place, wanted)
            return None

        return wait
    if "ARRIVE" in i.modifiers:
        expected = None if "A1T0" in i.modifiers else source(operands[2], block)

        def arrive(w: Warp) -> None:
            barrier, bytes_ = block.mbarriers[at(w)], expected(w) if expected else 0
            barrier.pending -= 1
            barrier.bytes_ += bytes_
            barrier.settle()
            w.event = (int(Event.ARRIVE), at(w), bytes_)

        return arrive
    raise KeyError(i.modifiers)


def copy_tensor(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    registers = [int(o.strip("[]").lstrip("UR")) for o in operands[:2]]
    if i.opcode == "UTMASTG":

        def store(w: Warp) -> None:
            w.event = (int(Event.COPY_OUT), 0, block.maps[_known(w.u[registers[1]])])

        return store

    def load(w: Warp) -> None:
        place, bytes_ = _known(w.u[registers[0] + 1]), block.maps[_known(w.u[registers[1]])]
        _arrives(block, place, bytes_)
        w.event = (int(Event.COPY_IN), place, bytes_)

    return load


def copy_bulk(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    registers = [int(o.strip("[]").lstrip("UR")) for o in operands]

    def do(w: Warp) -> None:
        bytes_ = 16 * (_known(w.u[registers[2]]) & 0xFFFF)
        if i.opcode == "UBLKRED" or i.modifiers[:2] == ("G", "S"):
            w.event = (int(Event.COPY_OUT), 0, bytes_)
            return
        place = _known(w.u[registers[0] + 1])
        _arrives(block, place, bytes_)
        w.event = (int(Event.COPY_IN), place, bytes_)

    return do


def copy_by_warp(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    """``cp.async``: 32 lanes of so many bits each; zeros, which nobody fetches, where the last
    operand is a predicate that is false."""
    bytes_ = 32 * int(i.modifiers[-1]) // 8
    fetched = predicate(operands[-1]) if is_predicate(operands[-1]) else None

    def do(w: Warp) -> None:
        moved = bytes_ if fetched is None or fetched(w) else 0
        w.event = (int(Event.WARP_COPY), 0, moved)

    return do


def end_of_copies(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    """``cp.async.commit_group``."""

    def do(w: Warp) -> None:
        w.event = (int(Event.WARP_COPIES_END), 0, 0)

    return do


def add(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    """An addition to memory from an accumulator: four lanes a row, eight rows."""

    def do(w: Warp) -> None:
        w.event = (int(Event.ADD), 0, SECTOR * ROWS_OF_ACCUMULATOR)

    return do


def _known(value: int | None) -> int:
    if value is None:
        raise ValueError("an address or a size depends on the data")
    return value


def _arrives(block: Block, place: int, bytes_: int) -> None:
    barrier = block.mbarriers[place]
    barrier.bytes_ -= bytes_
    barrier.settle()


def load(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    puts = [target(name) for name in _registers(i, operands[0])]
    at = address(operands[1], block)
    # A word that only a thread that is not followed has stored holds what loads return.
    otherwise = None if i.opcode == "LDL" else block.launch.loaded

    def do(w: Warp) -> None:
        memory: Mapping[int, int | None] = block.shared
        if i.opcode != "LDS":
            memory = w.local if i.opcode == "LDL" else block.launch.memory
        for word, put in enumerate(puts):
            try:
                put(w, memory.get(at(w) + WORD_BYTES * word, otherwise))
            except TypeError:
                put(w, None)

    return do


def store(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    at = address(operands[0], block)
    values = [source(name, block) for name in _registers(i, operands[1])]

    def do(w: Warp) -> None:
        memory = w.local if i.opcode == "STL" else block.shared
        try:
            place = at(w)
        except TypeError:
            return
        for word, value in enumerate(values):
            try:
                memory[place + WORD_BYTES * word] = value(w)
            except TypeError:
                memory[place + WORD_BYTES * word] = None

    return do


def _registers(i: Instruction, first: str) -> list[str]:
    """The registers of a load's or store's words; RZ is its own next."""
    words = next((n for name, n in (("64", 2), ("128", 4)) if name in i.modifiers), 1)
    name = first.strip().removesuffix(".reuse")
    if words == 1 or not name[1:].isdigit():
        return [first] * words
    return [f"{name[0]}{int(name[1:]) + word}" for word in range(words)]


def atomic(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    put = target(operands[1] if is_predicate(operands[0]) else operands[0])

    def do(w: Warp) -> None:
        put(w, block.taken.pop(0) if block.taken else None)

    return do


def granted(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    if "TRY_ALLOC" not in i.modifiers:
        return nothing
    out = target_predicate(operands[0])
    return lambda w: out(w, True)
