"""Runs the integer part of a kernel's machine code, to see which way every warp takes.

Loops of the attention kernels do not depend on the data, so what a warp executes follows from the
launch: its registers that hold addresses, counters and predicates are computed here, one thread a
warp (the first); results of floating point are not known and need not be. Warps meet at mbarriers
and named barriers as on a GPU, so a tile number that one warp hands to another arrives. Copies
arrive at once: this says in which order, not when.

Where the data could decide a branch, it is taken as usual data would: sums are positive, scores are
finite, and no score is much above the running maximum (so a lazy rescaling is skipped).
"""

from __future__ import annotations

from analysis.loop_model.program import Event, Way
from kernels.sass.code import Code
from kernels.sass.operands import BLOCKED, MASK, Block, Do, Get, Launch, TensorMapArgument, Warp, guard
from kernels.sass.operations import compile_

WARP = 32
PARAMETERS = {"sm_80": 0x160, "sm_90": 0x210, "sm_90a": 0x210}
"""Where arguments begin in the constant bank, by architecture (code)."""
MAP_BYTES = 128
BANK_ADDRESS = 0x10000000  # of the constant bank, as a generic address
STEPS_LIMIT = 4_000_000


def ways(code: Code, launch: Launch) -> tuple[tuple[Way, ...], dict[int, int]]:
    """The way of every warp of one thread block, and the arrivals of each mbarrier.

    Raises ValueError, one line, for an instruction that is not understood, an argument that is
    missing, and warps that wait for each other for ever.
    """
    constants, maps = _constant_bank(launch)
    block = Block(launch, constants, maps, taken=list(launch.taken))
    program = [compile_(i, code.labels, block) for i in code.instructions]
    guards = [guard(i.predicate) for i in code.instructions]
    running = [Warp(n) for n in range(-(-launch.threads // WARP))]
    everyone = list(running)
    total = 0
    while running:
        before = total
        for warp in running:
            total += _advance(warp, program, guards)
        running = [w for w in running if not w.done]
        if running and total == before:
            at = code.instructions[running[0].pc]
            raise ValueError(f"warp {running[0].number} waits for ever at {at.opcode} {at.operands}")
        if total > STEPS_LIMIT:
            raise ValueError(f"more than {STEPS_LIMIT} instructions: no end of the loop in sight")
    arrivals = {address: barrier.count for address, barrier in block.mbarriers.items()}
    return tuple(w.way for w in everyone), arrivals


def _advance(warp: Warp, program: list[Do], guards: list[Get | None]) -> int:
    """Until the warp waits or ends; the number of instructions."""
    way, count = warp.way, 0
    none, off, jump = (int(Event.NONE), 0, 0), (int(Event.OFF), 0, 0), (int(Event.JUMP), 0, 0)
    while True:
        at = warp.pc
        when = guards[at]
        if when is not None and not when(warp):
            way.add(at, *off)
            warp.pc = at + 1
            count += 1
            continue
        warp.event = none
        there = program[at](warp)
        if there is None:
            way.add(at, *warp.event)
            warp.pc = at + 1
        elif there >= 0:
            way.add(at, *jump)
            warp.pc = there
        elif there == BLOCKED:
            return count
        else:
            way.add(at, *none)
            warp.done = True
            return count + 1
        count += 1
        if count > STEPS_LIMIT:
            return count


def _constant_bank(launch: Launch) -> tuple[dict[int, int], dict[int, int]]:
    bank: dict[int, int] = {}
    maps: dict[int, int] = {}
    for place, size in ((0x0, launch.threads), (0x4, 1), (0x8, 1)):
        bank[place] = size
    for place, size in zip((0xC, 0x10, 0x14), launch.grid, strict=True):
        bank[place] = size
    first = at = PARAMETERS[launch.architecture]
    bank[0x28] = 0xFFF000  # the stack
    # What describes global memory; on Hopper also the bank's own address.
    hopper = {0x198: BANK_ADDRESS, 0x208: 0}
    descriptors = {"sm_80": {0x118: 0}, "sm_90": hopper, "sm_90a": hopper}
    for place, address in descriptors[launch.architecture].items():
        bank |= {place: address, place + 4: 0}
    for size, value in launch.arguments:
        # A struct of words has a size that its words' alignment divides.
        alignment = 64 if isinstance(value, TensorMapArgument) else min(size & -size, 8)
        at = -(-at // alignment) * alignment
        if isinstance(value, TensorMapArgument):
            maps[BANK_ADDRESS + at - first] = value.box_bytes
            for word in range(0, MAP_BYTES, 4):
                bank[at + word] = 0
        else:
            for word in range(0, size, 4):
                bank[at + word] = (value >> (8 * word)) & MASK
        at += size
    return bank, maps
