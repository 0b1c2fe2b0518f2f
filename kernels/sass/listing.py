"""Machine code of an entry point in few characters, one instruction a line.

So that a model of time can be checked where neither compiler nor disassembler is at hand:
``listing`` writes one, ``parse_listing`` reads it. A line is

    stall, yield, scoreboards written and read, scoreboards waited for, operands kept, instruction

in one hexadecimal digit, ``y`` or ``-``, a digit or ``-`` each, two and one hexadecimal digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kernels.sass.code import Code, Control, Instruction

_LISTED = re.compile(
    r"^([0-9a-f])([-y])([-0-5])([-0-5])([0-9a-f]{2})([0-9a-f]) "
    r"(?:(@!?U?P\w+) )?([A-Z][A-Z0-9_]*)((?:\.\w+)*) ?(.*)$"
)


def listing(code: Code) -> str:
    """The code as text. ValueError for a disassembly without encodings."""
    at: dict[int, list[str]] = {}
    targets = {label for i in code.instructions for label in re.findall(r"\.L_x_\d+", i.operands)}
    for label, index in code.labels.items():
        if label in targets:
            at.setdefault(index, []).append(f"{label}:")
    lines = []
    for index, i in enumerate(code.instructions):
        if i.control is None:
            raise ValueError(f"no control fields at 0x{i.address:x}: disassemble with encodings")
        c = i.control
        lines += at.get(index, [])
        barriers = "".join("-" if n is None else str(n) for n in (c.write_barrier, c.read_barrier))
        waits = sum(1 << barrier for barrier in c.waits)
        text = " ".join(filter(None, (i.predicate, ".".join((i.opcode, *i.modifiers)), i.operands)))
        yields = "y" if c.yields else "-"
        lines.append(f"{c.stall:x}{yields}{barriers}{waits:02x}{c.reuse:x} {text}")
    return "\n".join(lines) + "\n"


def parse_listing(lines: Iterable[str]) -> Code:
    """What ``listing`` wrote. ValueError names a line that is none of it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in lines:
        if line.startswith(".L_x_"):
            labels[line.strip().rstrip(":")] = len(instructions)
            continue
        found = _LISTED.match(line.rstrip("\n"))
        if found is None:
            raise ValueError(f"not a line of a listing: {line.strip()[:60]!r}")
        stall, yields, write, read, waits, reuse, predicate, opcode, modifiers, operands = found.groups()
        control = Control(
            int(stall, 16),
            yields == "y",
            None if write == "-" else int(write),
            None if read == "-" else int(read),
            tuple(barrier for barrier in range(6) if int(waits, 16) >> barrier & 1),
            int(reuse, 16),
        )
        instructions.append(
            Instruction(
                16 * len(instructions), predicate or "", opcode, tuple(modifiers.split(".")[1:]), operands, control
            )
        )
    return Code(tuple(instructions), labels)
