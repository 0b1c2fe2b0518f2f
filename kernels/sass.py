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
from dataclasses import dataclass
from pathlib import Path

MISSING = "reading machine code needs nvdisasm: pip install nvidia-cuda-nvdisasm"

_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;"
)
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``LDG`` is the opcode of ``@P0 LDG.E.128 R4, desc[UR4][R2.64]``."""

    address: int
    predicate: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: str


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


def count(instructions: Iterable[Instruction]) -> Counter[str]:
    """How often each opcode occurs."""
    return Counter(i.opcode for i in instructions)


def wide_accesses(instructions: Iterable[Instruction]) -> int:
    """Memory instructions that move 16 bytes a thread, or whole tiles."""
    wide = ("LDG", "STG", "LDS", "STS", "LDGSTS")
    tiles = ("LDSM", "STSM", "UTMALDG", "UTMASTG", "UBLKCP", "UBLKRED")
    return sum(
        i.opcode in tiles or (i.opcode in wide and "128" in i.modifiers) for i in instructions
    )


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
            [program, "-c", file.name], capture_output=True, text=True, check=False
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
        found = _INSTRUCTION.match(line)
        if found:
            address, predicate, opcode, modifiers, operands = found.groups()
            instructions.append(
                Instruction(
                    int(address, 16), predicate or "", opcode,
                    tuple(modifiers.split(".")[1:]), operands,
                )
            )  # fmt: skip
    return Code(tuple(instructions), labels)
