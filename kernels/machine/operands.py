"""One operand of a disassembled instruction, read into numbers."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

(
    NONE,
    REGISTER,
    UNIFORM,
    IMMEDIATE,
    CONSTANT,
    PREDICATE,
    UNIFORM_PREDICATE,
    MEMORY,
    LABEL,
    SPECIAL,
    BARRIER,
    DESCRIPTOR,
) = range(12)
NEGATED, ABSOLUTE, INVERTED, NOT = 1, 2, 4, 8
ZERO, UNIFORM_ZERO, TRUE = 255, 63, 7
PARTS = {"H0_H0": 1, "H1_H1": 2, "B0": 3, "B1": 4, "B2": 5, "B3": 6, "H0": 7, "H1": 8, "H1_H0": 0}

_NAME = re.compile(r"^(UR|R|UP|P)(\d+|Z|T)((?:\.\w+)*)$")
_CONSTANT = re.compile(
    r"^c\[(0x[0-9a-f]+)\]"
    r"\[(?:(U?R\d+|U?RZ)(?:\+?(-?0x[0-9a-f]+))?|(-?0x[0-9a-f]+))\]((?:\.\w+)*)$"
)

_HEX = re.compile(r"^-?0x[0-9a-f]+$")
DECIMAL = re.compile(r"^[-+]?(\d+(\.\d*)?(e[-+]?\d+)?|INF|QNAN|SNAN|NAN)$", re.I)


class NotUnderstoodError(ValueError):
    """An instruction that the executor has no meaning for."""


@dataclass
class Operand:
    """See ``native/state.hpp``."""

    kind: int = NONE
    reg: int = ZERO
    flags: int = 0
    part: int = 0
    ureg: int = UNIFORM_ZERO
    bank: int = 0
    scale: int = 1
    wide: int = 0
    value: int = 0
    suffixes: tuple[str, ...] = ()

    @property
    def is_source(self) -> bool:
        return self.kind in (REGISTER, UNIFORM, IMMEDIATE, CONSTANT)

    @property
    def is_predicate(self) -> bool:
        return self.kind in (PREDICATE, UNIFORM_PREDICATE)


def split(text: str) -> list[str]:
    """The operands of an instruction; commas inside braces separate nothing."""
    return [part.strip() for part in re.split(r",(?![^{]*\})", text) if part.strip()]


def float_bits(text: str) -> int:
    return int(struct.unpack("<I", struct.pack("<f", _number(text)))[0])


def double_bits(text: str) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", _number(text)))[0])


def half_bits(text: str, bf16: bool) -> int:
    if bf16:
        return float_bits(text) >> 16
    return int(struct.unpack("<H", struct.pack("<e", _number(text)))[0])


def _number(text: str) -> float:
    text = text.strip()
    if text.upper().endswith("NAN"):
        return float("-nan" if text.startswith("-") else "nan")
    return float(text)


def read(text: str, numbers: str, resolve: Callable[[str], int]) -> Operand:
    """Read one operand. NotUnderstoodError for any other form.

    numbers: how a decimal immediate is meant, see ``table.Opcode``.
    resolve: the index of a label's instruction, or a symbol's address.
    """
    text = text.strip()
    flags = 0
    while text[:1] in ("-", "~", "!", "|") and not _HEX.match(text) and not DECIMAL.match(text):
        sign, text = text[0], text[1:]
        flags |= {"-": NEGATED, "~": INVERTED, "!": NOT, "|": ABSOLUTE}[sign]
        if sign == "|":
            closing = text.rindex("|")
            text = text[:closing] + text[closing + 1 :]
    text = text.replace(".reuse", "")
    named = _NAME.match(text)
    if named:
        return _register(named, flags)
    if _HEX.match(text):
        value = int(text, 16)
        if numbers == "double":
            value = (value & 0xFFFFFFFF) << 32
        return Operand(IMMEDIATE, flags=flags, value=value)
    if DECIMAL.match(text):
        if numbers == "int":
            return Operand(IMMEDIATE, flags=flags, value=int(text))
        bits = double_bits(text) if numbers == "double" else float_bits(text)
        return Operand(IMMEDIATE, flags=flags, value=_signed(bits))
    constant = _CONSTANT.match(text)
    if constant:
        return _constant(constant, flags)
    if text.startswith("`("):
        return Operand(LABEL, value=resolve(text[2:].rstrip(")")))
    if text.startswith(("32@lo(", "32@hi(")):
        address = resolve(text[6:].rstrip(")").strip("()"))
        return Operand(IMMEDIATE, value=address & 0xFFFFFFFF if "@lo" in text else address >> 32)
    if text.startswith(("[", "desc[", "gdesc[")):
        return _memory(text)
    if re.match(r"^B\d+$", text):
        return Operand(BARRIER, reg=int(text[1:]))
    return Operand(SPECIAL, suffixes=(text,))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits


def _register(named: re.Match[str], flags: int) -> Operand:
    file, number, tail = named.groups()
    kind = {"R": REGISTER, "UR": UNIFORM, "P": PREDICATE, "UP": UNIFORM_PREDICATE}[file]
    reg = {"Z": UNIFORM_ZERO if file == "UR" else ZERO, "T": TRUE}.get(number)
    part, others = 0, []
    for suffix in tail.split(".")[1:]:
        if suffix in PARTS:
            part = PARTS[suffix]
        else:
            others.append(suffix)
    return Operand(kind, int(number) if reg is None else reg, flags, part, suffixes=tuple(others))


def _constant(found: re.Match[str], flags: int) -> Operand:
    bank, register, offset, plain, tail = found.groups()
    value = int(offset or plain or "0", 16)
    operand = Operand(CONSTANT, flags=flags, bank=int(bank, 16), value=value)
    if register and not register.endswith("Z"):
        operand.reg = int(register.lstrip("UR"))
        operand.part = UNIFORM if register.startswith("UR") else REGISTER
    for suffix in tail.split(".")[1:]:
        if suffix not in PARTS:
            raise NotUnderstoodError(suffix)
        operand.part = PARTS[suffix]
    return operand


def _memory(text: str) -> Operand:
    operand = Operand(MEMORY)
    if text.startswith("gdesc["):
        operand.kind = DESCRIPTOR
        inside, tail = re.match(r"^gdesc\[(UR\d+)\](.*)$", text).groups()  # type: ignore[union-attr]
        operand.ureg = int(inside[2:])
        operand.suffixes = tuple(tail.split(".")[1:])
        return operand
    found = re.match(r"^(?:desc\[(?:UR\d+|URZ)\])?\[([^\[\]]*)\]$", text)
    if found is None:
        raise NotUnderstoodError(text)
    for part in filter(None, re.split(r"\+", found[1])):
        if _HEX.match(part):
            operand.value += int(part, 16)
            continue
        named = _NAME.match(part)
        if named is None:
            raise NotUnderstoodError(text)
        file, number, tail = named.groups()
        suffixes = tail.split(".")[1:]
        if file == "UR":
            operand.ureg = UNIFORM_ZERO if number == "Z" else int(number)
            suffixes = [s for s in suffixes if s != "64"]
        else:
            operand.reg = ZERO if number == "Z" else int(number)
        for suffix in suffixes:
            if suffix in ("X4", "X8", "X16"):
                operand.scale = int(suffix[1:])
            elif suffix in ("64", "U32"):
                operand.wide = {"64": 1, "U32": 2}[suffix]
            else:
                raise NotUnderstoodError(text)
    return operand
