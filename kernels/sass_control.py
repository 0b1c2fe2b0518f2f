"""The control fields of Volta to Hopper machine code: when an instruction may issue.

Every instruction is a 128-bit word. Beside the operation it holds what the compiler knows of time:

stall
    clocks before the warp's next instruction may issue (0 to 15), which covers every result of
    fixed latency;
yields
    the scheduler should prefer another warp;
write_barrier, read_barrier
    the one of six counters that is raised now and lowered when the result is written, or when the
    sources have been read; None if it needs neither;
wait
    the counters that must be 0 before this instruction issues, a bit each;
reuse
    which source operands the register file keeps for the next instruction, a bit each.

Bit positions: Jia et al., arXiv 1804.06826, figure 2.1; Huerta et al., arXiv 2503.20481, section 4.

A listing is the disassembly of one entry point in few characters, one instruction a line, so that a
model can be checked where neither compiler nor disassembler is at hand: ``listing`` writes it,
``parse_listing`` reads it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from kernels.sass import MISSING, Instruction, find_nvdisasm, parse

_WORD = re.compile(r"/\* 0x([0-9a-f]{16}) \*/\s*$")
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s")
_COMMENT = re.compile(r"\s*\(\*.*?\*\)")
_LISTED = re.compile(
    r"^([0-9a-f])([-y])([-0-5])([-0-5])([0-9a-f]{2})([0-9a-f]) "
    r"(?:(@!?U?P\w+) )?([A-Z][A-Z0-9_]*)((?:\.\w+)*) ?(.*)$"
)
NO_BARRIER = 7


@dataclass(frozen=True)
class Control:
    """The control fields of one instruction."""

    stall: int
    yields: bool
    write_barrier: int | None
    read_barrier: int | None
    wait: int
    reuse: int

    @classmethod
    def of_word(cls, word: int) -> Control:
        """From the 128 bits of an instruction."""

        def field(low: int, bits: int) -> int:
            return (word >> low) & ((1 << bits) - 1)

        write, read = field(110, 3), field(113, 3)
        return cls(
            stall=field(105, 4),
            yields=not field(109, 1),
            write_barrier=None if write == NO_BARRIER else write,
            read_barrier=None if read == NO_BARRIER else read,
            wait=field(116, 6),
            reuse=field(122, 4),
        )


@dataclass(frozen=True)
class TimedCode:
    """The instructions of an entry point with their control fields, and its labels.

    labels: label -> index of the instruction behind it.
    """

    instructions: tuple[Instruction, ...]
    controls: tuple[Control, ...]
    labels: dict[str, int]


def timed_disassembly(cubin: bytes, entry: str) -> TimedCode:
    """The code of one entry point of a cubin. RuntimeError, one line, without nvdisasm or entry."""
    program = find_nvdisasm()
    if program is None:
        raise RuntimeError(MISSING)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "-c", "-hex", file.name], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {(done.stderr.strip() or 'failed').splitlines()[0]}")
    return parse_hex(done.stdout, entry)


def parse_hex(text: str, entry: str) -> TimedCode:
    """The section of ``entry`` in the output of ``nvdisasm -c -hex``.

    RuntimeError for machine code that is not of 128-bit words.
    """
    code = parse(text, entry)
    words: dict[int, int] = {}
    lines = text[text.find(f"\n.text.{entry}:") :].split("\n")
    for line, following in pairwise(lines):
        address, low, high = _ADDRESS.match(line), _WORD.search(line), _WORD.search(following)
        if address and low and high and int(address[1], 16) not in words:
            words[int(address[1], 16)] = int(high[1], 16) << 64 | int(low[1], 16)
    try:
        controls = tuple(Control.of_word(words[i.address]) for i in code.instructions)
    except KeyError as error:
        raise RuntimeError(f"{entry}: no 128-bit word at address {error}") from None
    cleaned = tuple(
        Instruction(i.address, i.predicate, i.opcode, i.modifiers, _COMMENT.sub("", i.operands))
        for i in code.instructions
    )
    return TimedCode(cleaned, controls, code.labels)


def listing(code: TimedCode) -> str:
    """One instruction a line: stall, yield, write and read counter, wait, reuse, then the text."""
    at: dict[int, list[str]] = {}
    targets = {label for i in code.instructions for label in re.findall(r"\.L_x_\d+", i.operands)}
    for label, index in code.labels.items():
        if label in targets:
            at.setdefault(index, []).append(f"{label}:")
    lines = []
    for index, (i, c) in enumerate(zip(code.instructions, code.controls, strict=True)):
        lines += at.get(index, [])
        counters = "".join("-" if n is None else str(n) for n in (c.write_barrier, c.read_barrier))
        text = " ".join(filter(None, (i.predicate, ".".join((i.opcode, *i.modifiers)), i.operands)))
        lines.append(
            f"{c.stall:x}{'y' if c.yields else '-'}{counters}{c.wait:02x}{c.reuse:x} {text}"
        )
    return "\n".join(lines) + "\n"


def parse_listing(lines: Iterable[str]) -> TimedCode:
    """What ``listing`` wrote. ValueError names a line that is none of it."""
    instructions: list[Instruction] = []
    controls: list[Control] = []
    labels: dict[str, int] = {}
    for line in lines:
        if line.startswith(".L_x_"):
            labels[line.strip().rstrip(":")] = len(instructions)
            continue
        found = _LISTED.match(line.rstrip("\n"))
        if found is None:
            raise ValueError(f"not a line of a listing: {line.strip()[:60]!r}")
        stall, yields, write, read, wait, reuse, predicate, opcode, modifiers, operands = (
            found.groups()
        )
        instructions.append(
            Instruction(
                16 * len(instructions), predicate or "", opcode,
                tuple(modifiers.split(".")[1:]), operands,
            )
        )  # fmt: skip
        controls.append(
            Control(
                int(stall, 16), yields == "y",
                None if write == "-" else int(write), None if read == "-" else int(read),
                int(wait, 16), int(reuse, 16),
            )
        )  # fmt: skip
    return TimedCode(tuple(instructions), tuple(controls), labels)
