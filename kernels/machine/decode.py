"""Machine code as nvdisasm prints it, decoded for the executor.

What is not in ``table`` ends with its text and address: nothing is guessed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from analysis.files import cache_dir
from kernels.building.cache import digest, read_checked, write_checked
from kernels.machine import operands as ops
from kernels.machine.operands import NotUnderstoodError, Operand
from kernels.machine.table import OPCODES, SPECIAL_REGISTERS, TYPES, WHOLE_TYPES, Opcode
from kernels.sass.code import MISSING, find_nvdisasm

DST, OUT0, OUT1, A, B, C, IN0, IN1, MEM, EXTRA, SLOTS = range(11)
GUARD_NEGATED, GUARD_UNIFORM = 1, 2

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?(.*?)\s*;")
_LABEL = re.compile(r"^([.$][\w$.]+):")
_REMARK = re.compile(r"\s*\(\*.*?\*\)")


@dataclass
class Decoded:
    """An instruction ready for ``native/machine.cpp``."""

    address: int
    text: str
    operation: str
    guard: int
    guard_flags: int
    target: int
    mod: list[int]
    slots: list[Operand]

    @property
    def opcode(self) -> str:
        return self.text.split(" ")[0]


@dataclass
class Line:
    """An instruction's text, not decoded yet."""

    address: int
    guard: str
    text: str


def disassemble(cubin: bytes) -> str:
    """nvdisasm's text of a whole cubin, kept in the cache. RuntimeError without nvdisasm."""
    path = cache_dir() / "sass" / f"text-{digest(cubin)}.txt"
    kept = read_checked(path)
    if kept is not None:
        return kept.decode()
    program = find_nvdisasm()
    if program is None:
        raise RuntimeError(MISSING)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "-c", file.name], capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    if done.returncode or ".text." not in done.stdout:
        raise RuntimeError(f"nvdisasm: {(done.stderr.strip() or 'failed').splitlines()[0]}")
    lines = [line for line in done.stdout.split("\n") if _LINE.match(line) or _LABEL.match(line)]
    text = "\n".join(lines)
    write_checked(path, text.encode())
    return text


def lines_of(text: str, entry: str) -> tuple[list[Line], dict[str, int]]:
    """The instructions of an entry's section and the index behind each label."""
    instructions: list[Line] = []
    labels: dict[str, int] = {}
    inside = False
    for line in text.split("\n"):
        label = _LABEL.match(line)
        if label:
            if label[1].startswith(".text."):
                inside = label[1] == f".text.{entry}"
            if inside:
                labels[label[1]] = len(instructions)
            continue
        found = _LINE.match(line)
        if inside and found:
            instructions.append(Line(int(found[1], 16), found[2] or "", " ".join(_REMARK.sub("", found[3]).split())))
    labels[entry] = 0
    return instructions, labels


def decode(lines: list[Line], labels: dict[str, int], symbols: Callable[[str], int]) -> list[Decoded]:
    """All instructions. NotUnderstoodError names the first that has no meaning here."""
    resolve = partial(_resolve, labels, lines, symbols)
    return [decode_one(line, resolve) for line in lines]


def _resolve(labels: dict[str, int], lines: list[Line], symbols: Callable[[str], int], name: str) -> int:
    if name in labels:
        return labels[name]
    return symbols(name)


def decode_one(line: Line, resolve: Callable[[str], int]) -> Decoded:
    """One instruction. NotUnderstoodError with its text and address."""
    try:
        return _decode(line, resolve)
    except (NotUnderstoodError, KeyError, ValueError, IndexError, AttributeError) as error:
        why = str(error) if isinstance(error, NotUnderstoodError) else "its form"
        raise NotUnderstoodError(
            f"not understood at 0x{line.address:x}: {line.text} ({why.strip() or 'its form'})"
        ) from None


def _decode(line: Line, resolve: Callable[[str], int]) -> Decoded:
    head, _, rest = line.text.partition(" ")
    name, *modifiers = head.split(".")
    if name == "BRA":
        return _branch(line, modifiers, rest, resolve)
    if name in ("HMMA", "HGMMA", "QGMMA"):
        return _product(line, name, modifiers, rest, resolve)
    opcode = OPCODES.get(name)
    if opcode is None:
        raise NotUnderstoodError(f"opcode {name}")
    mod = [0] * 8
    for slot, value in opcode.preset.items():
        mod[slot] = value
    left = _TYPED[name](modifiers, mod) if name in _TYPED else modifiers
    for modifier in left:
        if modifier not in opcode.modifiers:
            raise NotUnderstoodError(f"modifier {modifier}")
        for slot, value in opcode.modifiers[modifier].items():
            mod[slot] = value
    if name in ("RET", "BRX"):
        rest = rest.replace(" ", ", ", 1)
    tokens = ops.split(rest)
    if opcode.numbers == "half":
        tokens = _pair_immediates(tokens, "BF16_V2" in modifiers)
    read = [ops.read(token, opcode.numbers, resolve) for token in tokens]
    slots = _assign(opcode, read)
    _refine(name, modifiers, mod, slots)
    target = slots[B].value if name in ("CALL", "BSSY") else -1
    operation = opcode.operation
    if operation == "BMOV_FROM" and slots[DST].kind == ops.NONE:
        operation = "BMOV_TO"
    return _finished(line, operation, target, mod, slots)


def _finished(line: Line, operation: str, target: int, mod: list[int], slots: list[Operand]) -> Decoded:
    guard, flags = ops.TRUE, 0
    if line.guard:
        name = line.guard[1:].lstrip("!")
        flags = GUARD_NEGATED if "!" in line.guard else 0
        if name.startswith("U"):
            flags |= GUARD_UNIFORM
        guard = ops.TRUE if name.endswith("T") else int(name.lstrip("UP"))
    return Decoded(line.address, line.text, operation, guard, flags, target, mod, slots)


_SLOT_OF = {
    "d": DST,
    "a": A,
    "b": B,
    "c": C,
    "A": A,
    "B": B,
    "C": C,
    "m": MEM,
    "x": EXTRA,
    "s": EXTRA,
    "t": MEM,
    "k": B,
    "L": B,
    "S": A,
}


def _assign(opcode: Opcode, read: list[Operand]) -> list[Operand]:
    for pattern in opcode.patterns:
        slots = _fit(pattern, read)
        if slots is not None:
            return slots
    raise NotUnderstoodError("its operands")


def _fits(letter: str, o: Operand) -> bool:
    if letter in "pqABC":
        # "B" is a convergence barrier where one is meant.
        return o.is_predicate or (letter == "B" and o.kind == ops.BARRIER)
    if letter == "d":
        return o.kind in (ops.REGISTER, ops.UNIFORM) and not o.flags
    if letter in "abc":
        return o.is_source
    if letter in "mx":
        return o.kind == ops.MEMORY
    if letter in "st":
        return o.kind == ops.IMMEDIATE
    if letter == "k":
        return o.kind == ops.BARRIER
    if letter == "L":
        return o.kind == ops.LABEL
    if letter == "S":
        return o.kind == ops.SPECIAL
    return letter == "-"


def _fit(pattern: str, read: list[Operand]) -> list[Operand] | None:
    letters = re.findall(r"[a-zA-Z-]\??", pattern)
    slots = [Operand() for _ in range(SLOTS)]
    left = list(read)
    outs, ins = [OUT0, OUT1], [IN0, IN1]
    for k, letter in enumerate(letters):
        optional = letter.endswith("?")
        kind = letter[0]
        needed = sum(not later.endswith("?") for later in letters[k + 1 :])
        if not left or not _fits(kind, left[0]) or (optional and len(left) <= needed):
            if optional:
                continue
            return None
        operand = left.pop(0)
        if kind == "p":
            slots[outs.pop(0)] = operand
        elif kind == "q":
            slots[ins.pop(0)] = operand
        elif kind == "B" and operand.kind == ops.BARRIER:
            slots[A if slots[DST].kind == ops.NONE and slots[A].kind == ops.NONE else B] = operand
        elif kind != "-":
            slots[_SLOT_OF[kind]] = operand
    return None if left else slots


def _refine(name: str, modifiers: list[str], mod: list[int], slots: list[Operand]) -> None:
    """What a few opcodes need beyond their operands' order."""
    if name in ("LDG", "STG", "LDGSTS", "ATOMG", "ATOM", "RED", "REDG", "LD", "ST"):
        memory = slots[EXTRA] if name == "LDGSTS" else slots[MEM]
        memory.bank = 1  # a uniform register in a global address is a pair
        if "E" in modifiers and memory.wide == 0:
            memory.wide = 1  # so is a register, with .64 or without
    if name in ("S2R", "S2UR", "CS2R"):
        register = slots[A].suffixes[0]
        if register not in SPECIAL_REGISTERS:
            raise NotUnderstoodError(f"special register {register}")
        slots[A] = Operand(ops.SPECIAL, value=SPECIAL_REGISTERS.index(register))
    if name == "DEPBAR":
        mod[0] = slots[EXTRA].value if slots[EXTRA].kind == ops.IMMEDIATE else 0
    if name == "WARPGROUP":
        mod[1] = slots[EXTRA].value if slots[EXTRA].kind == ops.IMMEDIATE else 0
    if name == "RET":
        slots[B].value = 16 * slots[B].value  # the function's own address
    if name == "BRX":
        slots[B] = slots[EXTRA]
    if name == "ATOMS" and mod[0] == 10 and slots[DST].reg != ops.ZERO:
        raise NotUnderstoodError("POPC.INC that returns something")
    for operand in slots:
        if operand.kind in (ops.REGISTER, ops.UNIFORM) and operand.suffixes not in ((), ("64",)):
            raise NotUnderstoodError("." + ".".join(operand.suffixes))


def _pair_immediates(tokens: list[str], bf16: bool) -> list[str]:
    """Two numbers side by side are one immediate, the upper half first."""
    found: list[str] = []
    at = 0
    while at < len(tokens):
        here = tokens[at]
        if ops.DECIMAL.match(here) and at + 1 < len(tokens) and ops.DECIMAL.match(tokens[at + 1]):
            high, low = (ops.half_bits(text, bf16) for text in tokens[at : at + 2])
            found.append(f"0x{high << 16 | low:x}")
            at += 2
            continue
        found.append(here)
        at += 1
    return found


# ---- conversions: the types stand among the modifiers, the target's first


def _float_to_float(modifiers: list[str], mod: list[int]) -> list[str]:
    types = [m for m in modifiers if m in TYPES]
    if len(types) != 2:
        raise NotUnderstoodError("types")
    mod[1], mod[0] = TYPES[types[0]], TYPES[types[1]]
    return [m for m in modifiers if m not in TYPES]


def _float_to_whole(modifiers: list[str], mod: list[int]) -> list[str]:
    for modifier in modifiers:
        if modifier in WHOLE_TYPES:
            mod[0] = WHOLE_TYPES[modifier]
        if modifier in TYPES:
            mod[1] = TYPES[modifier]
    return [m for m in modifiers if m not in TYPES and m not in WHOLE_TYPES]


def _whole_to_float(modifiers: list[str], mod: list[int]) -> list[str]:
    for modifier in modifiers:
        if modifier in WHOLE_TYPES:
            mod[0] = WHOLE_TYPES[modifier]
        if modifier in TYPES:
            mod[1] = TYPES[modifier]
    return [m for m in modifiers if m not in TYPES and m not in WHOLE_TYPES]


_PACKED = {
    ("F16",): 0,
    ("F16", "F32"): 0,
    (): 0,
    ("BF16",): 1,
    ("BF16", "F32"): 1,
    ("E4M3", "F32"): 2,
    ("E5M2", "F32"): 3,
    ("F16", "E4M3"): 4,
    ("F16", "E5M2"): 5,
    ("E4M3",): 2,
    ("E5M2",): 3,
}


def _packs(modifiers: list[str], mod: list[int]) -> list[str]:
    names = ("F16", "BF16", "F32", "E4M3", "E5M2")
    mod[0] = _PACKED[tuple(m for m in modifiers if m in names)]
    return [m for m in modifiers if m not in names]


def _dot_of_bytes(modifiers: list[str], mod: list[int]) -> list[str]:
    types = [m for m in modifiers if m in ("S8", "U8")]
    mod[1], mod[2] = (int(t == "U8") for t in types)
    return [m for m in modifiers if m not in ("S8", "U8")]


def _bulk_copy(modifiers: list[str], mod: list[int]) -> list[str]:
    mod[0] = {("S", "G"): 0, ("G", "S"): 1}[tuple(modifiers[:2])]  # type: ignore[index]
    return modifiers[2:]


def _shared_atomic(modifiers: list[str], mod: list[int]) -> list[str]:
    if modifiers[:2] == ["POPC", "INC"]:  # one more for each thread
        mod[0] = 10
        return modifiers[2:]
    return modifiers


_TYPED: dict[str, Callable[[list[str], list[int]], list[str]]] = {
    "F2F": _float_to_float,
    "F2I": _float_to_whole,
    "I2F": _whole_to_float,
    "I2FP": _whole_to_float,
    "F2FP": _packs,
    "IDP": _dot_of_bytes,
    "UBLKCP": _bulk_copy,
    "ATOMS": _shared_atomic,
}


CONVERSIONS = {
    "F2F": tuple(TYPES),
    "F2I": (*WHOLE_TYPES, *TYPES),
    "I2F": (*WHOLE_TYPES, *TYPES),
    "I2FP": (*WHOLE_TYPES, *TYPES),
    "F2FP": ("F16", "BF16", "F32", "E4M3", "E5M2"),
    "IDP": ("S8", "U8"),
    "ATOMS": ("POPC.INC",),
    "UBLKCP": ("S.G", "G.S"),
}
"""Modifiers that are read here, not by the table."""

# ---- branches and products


def _branch(line: Line, modifiers: list[str], rest: str, resolve: Callable[[str], int]) -> Decoded:
    read = [ops.read(token, "int", resolve) for token in ops.split(rest)]
    slots = [Operand() for _ in range(SLOTS)]
    mod = [0] * 8
    if read[-1].kind != ops.LABEL:
        raise NotUnderstoodError("its target")
    kind = ".".join(modifiers)
    operation = "BRA"
    if kind in ("DIV", "CONV"):
        operation, mod[0] = "BRA_DIV", int(kind == "CONV")
    elif kind in ("U.ANY", "U.ALL"):
        operation, mod[0] = "BRA_ANY", int(kind == "U.ALL")
    elif kind not in ("", "U", "INC", "DEC"):
        raise NotUnderstoodError(f"modifier {kind}")
    if operation == "BRA" and len(read) > 1:
        slots[IN0] = read[0]
        if not read[0].is_predicate or len(read) > 2:
            raise NotUnderstoodError("its operands")
    return _finished(line, operation, read[-1].value, mod, slots)


_ELEMENTS = {"BF16": 1, "TF32": 2, "E4M3": 3, "E5M2": 4}


def _product(line: Line, name: str, modifiers: list[str], rest: str, resolve: Callable[[str], int]) -> Decoded:
    shape, result, *elements = modifiers
    read = [ops.read(token, "float", resolve) for token in ops.split(rest)]
    slots = [Operand() for _ in range(SLOTS)]
    mod = [0] * 8
    kinds = [_ELEMENTS[e] for e in elements] or [0]
    if result not in ("F32", "F16"):
        raise NotUnderstoodError(f"result {result}")
    if name == "HMMA":
        mod[0] = {"16816": 16, "1688": 8, "1684": 4}[shape]
        mod[1], mod[2] = kinds[0], int(result == "F16")
        slots[DST], slots[A], slots[B], slots[C] = read
        return _finished(line, "HMMA", -1, mod, slots)
    columns = int(shape.split("x")[1])
    mod[0], mod[1], mod[5] = columns // 8, kinds[0], int(result == "F16")
    mod[7] = kinds[-1]
    slots[DST] = read.pop(0)
    if read[0].kind == ops.REGISTER:
        mod[6] = 1
        slots[A] = read.pop(0)
    descriptor = read.pop(0)
    slots[MEM] = Operand(ops.MEMORY, ureg=descriptor.ureg)
    mod[2], mod[3] = (int(f"tnsp{x}" in descriptor.suffixes) for x in "AB")
    if any(s not in ("tnspA", "tnspB") for s in descriptor.suffixes):
        raise NotUnderstoodError("its descriptor")
    slots[C] = read.pop(0)
    for operand in read:
        if operand.is_predicate:
            slots[IN0] = operand
        elif operand.suffixes == ("gsb0",):
            mod[4] = 1
        else:
            raise NotUnderstoodError("its operands")
    return _finished(line, "HGMMA", -1, mod, slots)
