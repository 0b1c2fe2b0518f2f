"""From machine code to a program for the model of an SM (``analysis.loop_model``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from analysis.loop_model import ampere, hopper_warps
from analysis.loop_model.parameters import GROUP_WAIT, OPERATIONS, Operation
from analysis.loop_model.program import Program, Step
from kernels.sass.code import Code, Instruction
from kernels.sass.operands import Launch
from kernels.sass.run import ways

WARP = 32
#: Bytes of shared memory that an 8-byte load of a warp costs: in an accumulator's layout eight
#: lanes ask for the same pair of columns, so it is one access as wide as the memory.
ROW_STATISTICS = 128
_REGISTERS = re.compile(r"(?<![U\w])R(\d+)(\.reuse)?")
#: Bytes a lane moves by the modifier of an access to shared memory.
_WIDTH = {"64": 8, "128": 16, "U8": 1, "U16": 2, "S8": 1, "S16": 2}
_OPERATIONS = {"sm_80": ampere.OPERATIONS, "sm_90": hopper_warps.OPERATIONS, "sm_90a": OPERATIONS}
#: Depth of a warp's product over that of HMMA.16816, whose interval is that of the operation.
_DEPTHS = {"16816": 1.0, "1688": 0.5}
#: Registers of A, B and the accumulator of HMMA.16816.
_FRAGMENTS = (4, 2, 4)


def program(code: Code, launch: Launch) -> Program:
    """What the warps of one thread block of a launch execute.

    Raises ValueError, one line, for an instruction that the model does not know.
    """
    table = []
    before: Instruction | None = None
    for i in code.instructions:
        table.append(step(i, before, _OPERATIONS[launch.architecture]))
        before = i
    found, arrivals = ways(code, launch)
    return Program(tuple(table), found, arrivals)


def step(i: Instruction, before: Instruction | None = None, operations: Mapping[str, Operation] = OPERATIONS) -> Step:
    """An instruction as the model takes it. ValueError names one it does not know.

    before: the instruction in front, of whose sources some may still be at hand.
    operations: of the architecture.
    """
    text = ".".join((i.opcode, *i.modifiers))
    control = i.control
    if control is None:
        raise ValueError(f"no control fields for {text} {i.operands}: disassemble with encodings")
    operation = operations.get(i.opcode)
    if operation is None:
        raise ValueError(f"no unit is known for instruction {text} {i.operands}")
    amount = from_shared = pending = 0
    last = accumulates = False
    if i.opcode == "WARPGROUP" and "DEPBAR" in i.modifiers:
        operation, pending = GROUP_WAIT, int(i.operands.split(",")[1], 16)
    elif i.opcode == "DEPBAR":
        counter, left = i.operands.split(",")
        amount, pending = int(counter.strip().removeprefix("SB")), int(left, 16)
    elif i.opcode == "HGMMA":
        amount, from_shared = _product(i)
        last = "gsb0" in i.operands
        accumulates = not re.search(r"RZ, !UPT", i.operands)
    elif i.opcode == "HMMA":
        depth = _DEPTHS.get(i.modifiers[0])
        if depth is None:
            raise ValueError(f"no rate is known for products of shape {text} {i.operands}")
        operation = replace(operation, interval=int(operation.interval * depth))
    elif i.opcode == "LDGDEPBAR" and control.write_barrier is None:
        raise ValueError(f"no counter for {text} at 0x{i.address:x}: nothing could wait for it")
    elif i.opcode == "LDS" and "64" in i.modifiers:
        amount = ROW_STATISTICS
    elif i.opcode in ("LDS", "STS"):
        amount = WARP * next((_WIDTH[m] for m in i.modifiers if m in _WIDTH), 4)
    elif i.opcode in ("LDSM", "STSM"):
        amount = 128 * int(i.modifiers[-1])
    return Step(
        f"{text} {i.operands}",
        operation,
        control.stall,
        control.yields,
        -1 if control.write_barrier is None else control.write_barrier,
        -1 if control.read_barrier is None else control.read_barrier,
        sum(1 << barrier for barrier in control.waits),
        (0, 0) if i.opcode == "HGMMA" else _reads(i, before),
        amount,
        from_shared,
        last,
        accumulates,
        pending,
    )


def _product(i: Instruction) -> tuple[int, int]:
    """Columns, and the bytes that a warpgroup's product reads from shared memory.

    HGMMA.64xNx16: B has N rows of 16 two-byte elements; A, unless in registers, 64.
    """
    shape = next((m for m in i.modifiers if re.fullmatch(r"64x\d+x\d+", m)), None)
    if shape is None:
        raise ValueError(f"no shape in {'.'.join((i.opcode, *i.modifiers))} {i.operands}")
    rows, columns, depth = (int(n) for n in shape.split("x"))
    in_registers = re.match(r"R\d+, R\d+, gdesc", i.operands) is not None
    return columns, 2 * depth * (columns + (0 if in_registers else rows))


def _reads(i: Instruction, before: Instruction | None) -> tuple[int, int]:
    """Source registers that the even and the odd bank have to deliver.

    A source marked for reuse is kept for the same operand of the next instruction.
    """
    kept = set()
    if before is not None:
        kept = {(slot, number) for slot, number, reused in _sources(before) if reused}
    if i.opcode == "HMMA":  # aligned groups of registers, half of them in each bank
        needed_words = sum(_FRAGMENTS[slot] for slot, n, _ in _sources(i) if (slot, n) not in kept)
        return needed_words // 2, needed_words // 2
    needed = {n for slot, n, _ in _sources(i) if (slot, n) not in kept}
    odd = sum(n & 1 for n in needed)
    return len(needed) - odd, odd


def _sources(i: Instruction) -> list[tuple[int, int, bool]]:
    """Operand, register and whether it is marked for reuse; of 32-bit sources."""
    stores = ("STS", "STSM", "STG", "STL", "SYNCS", "BAR", "RED", "REDG", "LDGSTS")
    operands = i.operands.split(",")[0 if i.opcode in stores else 1 :]
    return [
        (slot, int(number), bool(reused))
        for slot, operand in enumerate(operands)
        for number, reused in _REGISTERS.findall(operand)
    ]
