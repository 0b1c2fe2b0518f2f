"""Registers, operands and shared state for ``kernels.sass.run``."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from analysis.loop_model.program import Event, Way

MASK = 0xFFFFFFFF
BLOCKED = -1
FINISHED = -2

_MEMORY = re.compile(r"\[([^\[\]]*)\]")
_REGISTER = re.compile(r"^(UR|R)(\d+|Z)(?:\.\w+)*$")
_CONSTANT = re.compile(r"^c\[0x0\]\[(0x[0-9a-f]+)\]$")

Get = Callable[["Warp"], int]
Do = Callable[["Warp"], "int | None"]


class UnknownValueError(TypeError):
    """A value that depends on the data."""


@dataclass(frozen=True)
class TensorMapArgument:
    """A tensor map among the arguments: bytes that one copy with it moves."""

    box_bytes: int


@dataclass(frozen=True)
class Launch:
    """What a launch passes: block and grid sizes, and the arguments in order.

    arguments: (bytes, value), a struct of words as one little-endian number; a tensor map has 128
        bytes.
    taken: what an atomic addition to a counter returns, one after another.
    architecture: "sm_80", "sm_90" or "sm_90a": where arguments lie, and what instructions cost.
    loaded: what loads of global memory return, and so words of shared memory that threads beside
        a warp's first have stored; None: not known.
    memory: known words of global memory, by the lower 32 bits of their address.
    """

    threads: int
    grid: tuple[int, int, int]
    arguments: Sequence[tuple[int, int | TensorMapArgument]]
    block: tuple[int, int, int] = (0, 0, 0)
    taken: Sequence[int] = ()
    architecture: str = "sm_90a"
    loaded: int | None = None
    memory: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Mbarrier:
    count: int
    pending: int
    bytes_: int = 0
    completed: int = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes_ == 0:
            self.completed += 1
            self.pending = self.count


@dataclass
class NamedBarrier:
    arrived: int = 0
    generation: int = 0


class Warp:
    """Registers and place of one warp."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.r: list[int | None] = [0] * 256
        self.u: list[int | None] = [0] * 64
        self.p = [False] * 7 + [True]
        self.up = [False] * 7 + [True]
        self.pc = 0
        self.done = False
        self.local: dict[int, int | None] = {}
        self.waiting_for: int | None = None
        self.event = (int(Event.NONE), 0, 0)
        self.way = Way(number)


@dataclass
class Block:
    """What the warps of a thread block share."""

    launch: Launch
    constants: dict[int, int]
    maps: dict[int, int]
    shared: dict[int, int | None] = field(default_factory=dict)
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    named: dict[int, NamedBarrier] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)


def predicate(name: str) -> Get:
    negated, name = name.startswith("!"), name.lstrip("!")
    number = 7 if name.endswith("T") else int(name.lstrip("UP"))
    if name.startswith("U"):
        return (lambda w: not w.up[number]) if negated else (lambda w: w.up[number])
    return (lambda w: not w.p[number]) if negated else (lambda w: w.p[number])


def guard(text: str) -> Get | None:
    """The condition in front of an instruction, e.g. ``@!P0``; None for none."""
    return predicate(text[1:]) if text else None


def is_predicate(text: str) -> bool:
    return re.fullmatch(r"!?U?P(\d|T)", text) is not None


def signed(value: int) -> int:
    return value - (1 << 32) if value & 0x80000000 else value


def as_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits & MASK))[0])


def as_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def source(text: str, block: Block) -> Get:
    """A 32-bit source operand. Reading an unknown one raises TypeError."""
    text = text.strip().replace(".reuse", "")
    if text[:1] in "-~|" and len(text) > 1:
        inner = source(text[1:].rstrip("|") if text[0] == "|" else text[1:], block)
        if text[0] == "-":
            return lambda w: -inner(w) & MASK
        if text[0] == "~":
            return lambda w: ~inner(w) & MASK
        return lambda w: abs(signed(inner(w)))
    if text.startswith("0x"):
        value = int(text, 16) & MASK
        return lambda w: value
    if text in ("SRZ", "RZ", "URZ"):
        return lambda w: 0
    found = _CONSTANT.match(text)
    if found:
        place = int(found[1], 16)
        if place & ~3 not in block.constants:
            raise ValueError(f"no argument at c[0x0][{found[1]}]: the launch has fewer")
        constant = block.constants[place & ~3] >> 8 * (place & 3)
        return lambda w: constant
    register = _REGISTER.match(text)
    if register:
        number = int(register[2])
        if register[1] == "UR":
            return lambda w: w.u[number]  # type: ignore[return-value]
        return lambda w: w.r[number]  # type: ignore[return-value]

    def unknown(w: Warp) -> int:
        raise UnknownValueError(text)

    return unknown


def wide(text: str, block: Block) -> Get:
    """A 64-bit source: a register and the next."""
    text = text.strip().replace(".reuse", "")
    if text in ("RZ", "URZ") or text.lstrip("-").startswith("0x"):
        value = 0 if text.endswith("RZ") else int(text, 16)
        return lambda w: value
    found = _REGISTER.match(text)
    if found is None:
        return source(text, block)
    number = int(found[2])
    if found[1] == "UR":
        return lambda w: w.u[number] | (w.u[number + 1] << 32)  # type: ignore[operator]
    return lambda w: w.r[number] | (w.r[number + 1] << 32)  # type: ignore[operator]


def target(text: str) -> Callable[[Warp, int | None], None]:
    found = _REGISTER.match(text.strip())
    if found is None or found[2] == "Z":
        return lambda w, value: None
    number = int(found[2])
    if found[1] == "UR":

        def set_uniform(w: Warp, value: int | None) -> None:
            w.u[number] = None if value is None else value & MASK

        return set_uniform

    def set_register(w: Warp, value: int | None) -> None:
        w.r[number] = None if value is None else value & MASK

    return set_register


def target_wide(text: str) -> Callable[[Warp, int | None], None]:
    found = _REGISTER.match(text.strip())
    if found is None or found[2] == "Z":
        return lambda w, value: None
    number, uniform = int(found[2]), found[1] == "UR"

    def set_pair(w: Warp, value: int | None) -> None:
        file = w.u if uniform else w.r
        file[number] = None if value is None else value & MASK
        file[number + 1] = None if value is None else (value >> 32) & MASK

    return set_pair


def target_predicate(text: str) -> Callable[[Warp, bool], None]:
    name = text.strip()
    if name.endswith("T"):
        return lambda w, value: None
    number, uniform = int(name.lstrip("UP")), name.startswith("U")

    def set_predicate(w: Warp, value: bool) -> None:
        (w.up if uniform else w.p)[number] = bool(value)

    return set_predicate


def lut(table: int, a: int, b: int, c: int) -> int:
    out = 0
    for k in range(8):
        if table >> k & 1:
            out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return out & MASK


def address(text: str, block: Block) -> Get:
    """The address in brackets, the last ones: registers and offsets added."""
    inside = _MEMORY.findall(text)
    if not inside:
        return source("?", block)
    parts = [p for p in inside[-1].replace("+-", "+~").split("+") if p]
    offset = -sum(int(p[1:], 16) for p in parts if p.startswith("~"))
    terms = [source(p.split(".")[0], block) for p in parts if not p.startswith("~")]
    return lambda w: (sum(term(w) for term in terms) + offset) & MASK
