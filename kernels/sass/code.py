"""Machine code of a compiled kernel: instructions, loops, and what is counted in them.

Needs nvdisasm (package nvidia-cuda-nvdisasm, or a CUDA toolkit on PATH); no GPU and no driver.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

MISSING = "reading machine code needs nvdisasm: pip install nvidia-cuda-nvdisasm"

#: Loads and stores whose modifiers say how many bits a thread moves.
MEMORY = ("LDG", "STG", "LDS", "STS", "LDGSTS")

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;")
_UPPER_HALF = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_REMARK = re.compile(r"\s*\(\*.*?\*\)")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Control:
    """What the compiler tells the scheduler, in an instruction's bits 105 to 125 (Volta to Hopper).

    Args:
        stall: clocks before the warp's next instruction may issue, 0 to 15.
        yields: the scheduler should prefer another warp next.
        write_barrier: scoreboard, 0 to 5, that is open until the result is written; None: none.
        read_barrier: scoreboard that is open until the operands have been read; None: none.
        waits: the scoreboards that must be closed before this instruction issues.
        reuse: which source operands are kept for the next instruction, a bit each.
    """

    stall: int
    yields: bool
    write_barrier: int | None
    read_barrier: int | None
    waits: tuple[int, ...]
    reuse: int = 0


def decode_control(upper: int) -> Control:
    """The control fields in the upper 64 bits of an instruction's 128."""
    write, read, mask = upper >> 46 & 7, upper >> 49 & 7, upper >> 52 & 63
    return Control(
        stall=upper >> 41 & 15,
        yields=not upper >> 45 & 1,
        write_barrier=write if write != 7 else None,
        read_barrier=read if read != 7 else None,
        waits=tuple(barrier for barrier in range(6) if mask >> barrier & 1),
        reuse=upper >> 58 & 15,
    )


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``LDG`` is the opcode of ``@P0 LDG.E.128 R4, desc[UR4][R2.64]``."""

    address: int
    predicate: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: str
    control: Control | None = None
    """None where the disassembly came without encodings."""

    @property
    def waits_for_products(self) -> int | None:
        """N of a ``wgmma.wait_group N``: groups of products that may still run; None for others."""
        if self.opcode == "WARPGROUP" and "DEPBAR" in self.modifiers:
            return int(self.operands.rsplit(",", 1)[1], 16)
        return None


@dataclass(frozen=True)
class Code:
    """The instructions of an entry point, in order, and where its labels point."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    """Label -> index of the instruction behind it."""

    def loops(self) -> list[list[Instruction]]:
        """The natural loops, smallest first.

        An edge to an earlier instruction closes a loop if every way to its source leads through its
        target; the loop is all that reaches the source without passing the target. Blocks that the
        compiler moves out of line (the retry of a wait) are no part of it that way.
        """
        follows = self._successors()
        before: dict[int, list[int]] = {}
        for source, targets in enumerate(follows):
            for target in targets:
                before.setdefault(target, []).append(source)
        found = []
        for source, targets in enumerate(follows):
            for head in (t for t in targets if t <= source):
                body, waiting = {head}, [source]
                while waiting:
                    at = waiting.pop()
                    if at not in body:
                        body.add(at)
                        waiting += before.get(at, [])
                if head == 0 or 0 not in body:
                    found.append([self.instructions[i] for i in sorted(body)])
        return sorted(found, key=len)

    def main_loop(self, opcode: str) -> list[Instruction]:
        """The smallest loop with that opcode. ValueError if there is none."""
        for loop in self.loops():
            if any(i.opcode == opcode for i in loop):
                return loop
        raise ValueError(f"no loop contains {opcode}")

    def shortest_round(self, opcode: str) -> list[Instruction]:
        """The shortest way once around :meth:`main_loop`, through that opcode.

        What a warp executes in an iteration where no rare branch (a mask's edge, a wait that must
        be tried again) is taken.
        """
        numbers = {i.address: n for n, i in enumerate(self.instructions)}
        inside = {numbers[i.address] for i in self.main_loop(opcode)}
        follows = self._successors()
        heads = {head for at in inside for head in follows[at] if head in inside and head <= at}
        rounds = []
        for head in heads:
            came_from: dict[int, int] = {}
            waiting = deque([head])
            while waiting:
                at = waiting.popleft()
                for there in follows[at]:
                    if there in inside and there not in came_from:
                        came_from[there] = at
                        waiting.append(there)
            if head not in came_from:
                continue
            way = [came_from[head]]
            while way[-1] != head:
                way.append(came_from[way[-1]])
            found = [self.instructions[at] for at in reversed(way)]
            if any(i.opcode == opcode for i in found):
                rounds.append(found)
        return min(rounds, key=len)

    def between_waits(self, running: int, left: int = 0) -> list[list[Instruction]]:
        """What runs under products: the shortest ways from a wait that lets ``running`` groups of
        them run on to the next wait for them, if that lets ``left`` run on. In order of address.
        """
        follows = self._successors()
        ways = []
        for start, first in enumerate(self.instructions):
            if first.waits_for_products != running:
                continue
            came_from: dict[int, int] = {}
            waiting = deque([start])
            while waiting:
                at = waiting.popleft()
                waits = self.instructions[at].waits_for_products
                if at != start and waits is not None:
                    break
                for there in follows[at]:
                    if there not in came_from and there != start:
                        came_from[there] = at
                        waiting.append(there)
            if at == start or waits != left:
                continue
            way = [came_from[at]]
            while way[-1] != start:
                way.append(came_from[way[-1]])
            ways.append([self.instructions[i] for i in reversed(way)][1:])
        return ways

    def registers_by_role(self) -> list[tuple[int, int]]:
        """Per ``setmaxnreg``: the registers a thread has from there on, and those that it uses."""
        follows = self._successors()
        found = []
        for start, first in enumerate(self.instructions):
            if first.opcode != "USETMAXREG":
                continue
            role, waiting = {start}, [start]
            while waiting:
                for there in follows[waiting.pop()]:
                    if there not in role:
                        role.add(there)
                        waiting.append(there)
            used = 1 + max(_highest_register(self.instructions[at]) for at in role)
            found.append((int(first.operands.rsplit(" ", 1)[-1], 16), used))
        return found

    def _successors(self) -> list[list[int]]:
        last = len(self.instructions) - 1
        follows: list[list[int]] = []
        for at, i in enumerate(self.instructions):
            target = _TARGET.search(i.operands)
            jumps = i.opcode == "BRA" and target is not None
            ends = i.opcode in ("EXIT", "RET") or jumps
            there = [self.labels[target[1]]] if jumps and target else []
            # Any condition, a predicate in front or as an operand, lets it fall through.
            conditional = bool(i.predicate) or (jumps and not i.operands.startswith("`"))
            falls = [at + 1] if at < last and (not ends or conditional) else []
            follows.append(falls + [t for t in there if t <= last])
        return follows


def _highest_register(instruction: Instruction) -> int:
    """Number of the last register of a thread that an instruction names; -1 if it names none."""
    width = 1  # of what it moves; an address says by itself that it takes two
    if instruction.opcode in MEMORY or instruction.opcode in ("LDSM", "STSM", "REDG"):
        wide = {"64": 2, "128": 4, "4": 4, "F32x4": 4}
        width = max((wide.get(modifier, 1) for modifier in instruction.modifiers), default=1)
    highest = -1
    for place, operand in enumerate(instruction.operands.split(", ")):
        for number, pair in re.findall(r"(?<![A-Z])R(\d+)(\.64)?", operand):
            here = 2 if pair else width if "[" not in operand else 1
            if instruction.opcode == "HGMMA":
                # The accumulator of 64 x n in places 0 and 3, A of 64 x 16 in place 1.
                here = 4 if place == 1 else int(instruction.modifiers[0].split("x")[1]) // 2
            highest = max(highest, int(number) + here - 1)
    return highest


def count(instructions: Iterable[Instruction]) -> Counter[str]:
    """How often each opcode occurs."""
    return Counter(i.opcode for i in instructions)


def wide_accesses(instructions: Iterable[Instruction]) -> int:
    """Memory instructions that move 16 bytes a thread, or whole tiles."""
    tiles = ("LDSM", "STSM", "UTMALDG", "UTMASTG", "UBLKCP", "UBLKRED")
    return sum(i.opcode in tiles or (i.opcode in MEMORY and "128" in i.modifiers) for i in instructions)


def find_nvdisasm() -> str | None:
    """The disassembler's path: of the package, else on PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*/bin/nvdisasm")):
            return str(path)
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes, entry: str) -> Code:
    """The code of one entry point. RuntimeError, in one line, without nvdisasm or entry."""
    program = find_nvdisasm()
    if program is None:
        raise RuntimeError(MISSING)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "-c", "-hex", file.name], capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {(done.stderr.strip() or 'failed').splitlines()[0]}")
    return parse(done.stdout, entry)


def parse(text: str, entry: str) -> Code:
    """The section of ``entry`` in nvdisasm's output."""
    start = text.find(f"\n.text.{entry}:")
    if start < 0:
        raise RuntimeError(f"no entry point {entry!r} in the disassembly")
    end = text.find("//--------------------- .", start)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text[start : end if end > 0 else len(text)].split("\n"):
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(instructions)
        upper = _UPPER_HALF.match(line)
        if upper and instructions:
            control = decode_control(int(upper[1], 16))
            instructions[-1] = replace(instructions[-1], control=control)
        found = _INSTRUCTION.match(line)
        if found:
            address, predicate, opcode, modifiers, operands = found.groups()
            instructions.append(
                Instruction(
                    int(address, 16),
                    predicate or "",
                    opcode,
                    tuple(modifiers.split(".")[1:]),
                    _REMARK.sub("", operands),
                )
            )
    return Code(tuple(instructions), labels)
