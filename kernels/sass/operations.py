"""What each machine instruction does to registers, predicates and barriers.

Only integers are computed; see ``kernels.sass.run``. An opcode that is in none of the tables here
is an error that names it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from itertools import product

from kernels.sass import sharing as sass_sharing
from kernels.sass.code import Instruction
from kernels.sass.operands import (
    FINISHED,
    MASK,
    Block,
    Do,
    Get,
    Warp,
    as_bits,
    as_float,
    is_predicate,
    lut,
    predicate,
    signed,
    source,
    target,
    target_predicate,
    target_wide,
    wide,
)

#: Take time but change nothing that is followed here: floating point, and hints.
WITHOUT_EFFECT = frozenset(
    [
        "FFMA",
        "FADD",
        "FMUL",
        "FMNMX",
        "FSEL",
        "F2FP",
        "F2F",
        "HGMMA",
        "HMMA",
        "HADD2",
        "HMUL2",
        "HFMA2",
        "LDSM",
        "STSM",
        "DEPBAR",
        "MEMBAR",
        "FENCE",
        "CCTL",
        "NOP",
        "YIELD",
        "BSSY",
        "BSYNC",
        "WARPSYNC",
        "WARPGROUP",
        "WARPGROUPSET",
        "ERRBAR",
        "ENDCOLLECTIVE",
        "BREAK",
        "STG",
        "STGM",
        "UTMACMDFLUSH",
        "UTMACCTL",
        "UTMAPF",
        "KILL",
        "NANOSLEEP",
        "ACQBULK",
        "PREEXIT",
    ]
)


def compile_(i: Instruction, labels: Mapping[str, int], block: Block) -> Do:
    """The function that carries out an instruction for a warp.

    It returns None to go on, an index to jump to, BLOCKED or FINISHED.
    """
    operands = [o.strip() for o in _split(i.operands)]
    if i.opcode in WITHOUT_EFFECT:
        return sass_sharing.nothing
    maker = _MAKERS.get(i.opcode)
    if maker is None:
        raise ValueError(f"instruction {i.opcode} {i.operands} at 0x{i.address:x} is not known")
    try:
        return maker(i, operands, labels, block)
    except (IndexError, AttributeError, KeyError):
        text = ".".join((i.opcode, *i.modifiers))
        raise ValueError(f"form {text} {i.operands} at 0x{i.address:x} is not known") from None


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part.strip()]


Maker = Callable[[Instruction, list[str], Mapping[str, int], Block], Do]


def _leading_predicates(operands: list[str]) -> tuple[list[str], list[str]]:
    """Predicates between the target and the sources, and the rest without them."""
    rest = operands[1:]
    found = []
    while rest and is_predicate(rest[0]):
        found.append(rest.pop(0))
    return found, rest


def _computed(operands: list[str], f: Callable[..., int], block: Block, count: int) -> Do:
    put = target(operands[0])
    sources = [source(o, block) for o in operands[1 : 1 + count]]

    def do(w: Warp) -> None:
        try:
            put(w, f(*[s(w) for s in sources]))
        except (TypeError, struct.error, ZeroDivisionError, OverflowError):
            put(w, None)

    return do


def _simple(f: Callable[..., int], count: int) -> Maker:
    return lambda i, operands, labels, block: _computed(operands, f, block, count)


def _addend(text: str, block: Block) -> Get:
    """A term of a sum. What is subtracted is added as its complement and 1, which carries for 0."""
    if not text.strip().startswith("-"):
        return source(text, block)
    inner = source(text.strip()[1:], block)
    return lambda w: (~inner(w) & MASK) + 1


def _add3(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    carries_out, rest = _leading_predicates(operands)
    terms = [o for o in rest if not is_predicate(o)]
    carries_in = [predicate(o) for o in rest if is_predicate(o)] if "X" in i.modifiers else []
    if "64" in i.modifiers:
        put, get = target_wide(operands[0]), wide
    else:
        put, get = target(operands[0]), _addend
    sources = [get(o, block) for o in terms]
    outs = [target_predicate(o) for o in carries_out[:1]]

    def do(w: Warp) -> None:
        try:
            total = sum(s(w) for s in sources) + sum(int(c(w)) for c in carries_in)
        except TypeError:
            put(w, None)
            return
        for out in outs:
            out(w, total >> 32 > 0)
        put(w, total)

    return do


def _multiply_add(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    _, rest = _leading_predicates(operands)
    carries_in = [predicate(o) for o in rest if is_predicate(o)]
    terms = [o for o in rest if not is_predicate(o)]
    unsigned = "U32" in i.modifiers
    a, b = source(terms[0], block), source(terms[1], block)
    wide_target = "WIDE" in i.modifiers
    high = "HI" in i.modifiers
    # The upper half of a product is taken after a 64-bit addend, a register and the next.
    c = wide(terms[2], block) if wide_target or high else source(terms[2], block)
    put = target_wide(operands[0]) if wide_target else target(operands[0])

    def do(w: Warp) -> None:
        try:
            x, y, z = a(w), b(w), c(w)
            if (high or wide_target) and not unsigned:
                x, y = signed(x), signed(y)
            total = x * y + z + sum(int(p(w)) for p in carries_in)
            put(w, total >> 32 if high else total)
        except TypeError:
            put(w, None)

    return do


def _lea(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    carries_out, rest = _leading_predicates(operands)
    carries_in = [predicate(o) for o in rest if is_predicate(o)]
    terms = [o for o in rest if not is_predicate(o)]
    put = target(operands[0])
    outs = [target_predicate(o) for o in carries_out]
    a, b = source(terms[0], block), _addend(terms[1], block)
    shift = int(terms[-1], 16)
    sign = "SX32" in i.modifiers
    upper = source(terms[2], block) if "HI" in i.modifiers and not sign else None

    def do(w: Warp) -> None:
        try:
            x = signed(a(w)) if sign else a(w)
            if upper is not None:
                x |= upper(w) << 32
            shifted = x << shift
            value = (shifted >> 32) if "HI" in i.modifiers else shifted & MASK
            total = (value & MASK) + b(w) + sum(int(p(w)) for p in carries_in)
        except TypeError:
            put(w, None)
            return
        for out in outs:
            out(w, total >> 32 > 0)
        put(w, total)

    return do


def _shift(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    put = target(operands[0])
    low, amount, high = (source(o, block) for o in operands[1:4])
    left, arithmetic = "L" in i.modifiers, "S32" in i.modifiers or "S64" in i.modifiers
    takes_high = "HI" in i.modifiers

    def do(w: Warp) -> None:
        try:
            by = amount(w)
            if "W" in i.modifiers:
                by &= 31
            if left:
                both = (high(w) << 32 | low(w)) << min(by, 64)
                put(w, both >> 32 if takes_high else both)
                return
            upper = signed(high(w)) if arithmetic else high(w)
            if takes_high:
                put(w, upper >> min(by, 63))
            else:
                put(w, (upper << 32 | low(w)) >> min(by, 63))
        except TypeError:
            put(w, None)

    return do


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


def _compare(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    first, second = target_predicate(operands[0]), target_predicate(operands[1])
    a, b, with_ = source(operands[2], block), source(operands[3], block), predicate(operands[4])
    compare = _COMPARE[i.modifiers[0]]
    unsigned, either = "U32" in i.modifiers, "OR" in i.modifiers

    def do(w: Warp) -> None:
        x, y = a(w), b(w)
        if x is None or y is None:
            first(w, False)
            second(w, False)
            return
        found = compare(x, y) if unsigned else compare(signed(x), signed(y))
        other = with_(w)
        first(w, bool(found or other if either else found and other))
        second(w, bool(not found or other if either else not found and other))

    return do


def _compare_floats(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    """Usual data: finite, positive sums, no score far above the maximum so far."""
    usual = i.modifiers[0] in ("GT", "GTU", "NE", "NEU") and (
        operands[3] in ("RZ", "+INF", "-INF") or operands[2] == "RZ"
    )
    first, second = target_predicate(operands[0]), target_predicate(operands[1])

    def do(w: Warp) -> None:
        first(w, usual)
        second(w, not usual)

    return do


def _lop3(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    out = None
    if is_predicate(operands[0]):
        out, operands = target_predicate(operands[0]), operands[1:]
    put = target(operands[0])
    sources = [source(o, block) for o in operands[1:4]]
    table = int(operands[4], 16)

    def do(w: Warp) -> None:
        given = [s(w) for s in sources]
        # Bits of what is not known may not matter: x & 0.
        choices = [(0, MASK) if value is None else (value,) for value in given]
        known = {lut(table, *bits) for bits in product(*choices)}
        if len(known) > 1:
            put(w, None)
            if out:
                out(w, False)
            return
        (value,) = known
        put(w, value)
        if out:
            out(w, value != 0)

    return do


def _plop3(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    first, second = target_predicate(operands[0]), target_predicate(operands[1])
    sources = [predicate(o) for o in operands[2:5]]
    tables = int(operands[5], 16), int(operands[6], 16)

    def do(w: Warp) -> None:
        index = sum(int(s(w)) << (2 - k) for k, s in enumerate(sources))
        first(w, bool(tables[0] >> index & 1))
        second(w, bool(tables[1] >> index & 1))

    return do


def _select(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    put, a, b = target(operands[0]), source(operands[1], block), source(operands[2], block)
    which = predicate(operands[3])

    def do(w: Warp) -> None:
        try:
            put(w, a(w) if which(w) else b(w))
        except TypeError:
            put(w, None)

    return do


def _minmax(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    put, smallest = target(operands[0]), predicate(operands[-1])
    adds = i.opcode == "VIADDMNMX"
    sources = [source(o, block) for o in operands[1:-1]]

    def do(w: Warp) -> None:
        try:
            x = [signed(s(w)) for s in sources]
        except TypeError:
            put(w, None)
            return
        compared = (x[0] + x[1], x[2]) if adds else x
        put(w, min(compared) if smallest(w) else max(compared))

    return do


def _move(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    if i.opcode == "CS2R" or "64" in i.modifiers:
        put, get = target_wide(operands[0]), wide(operands[1], block)
        if operands[1].startswith("c["):
            low = source(operands[1], block)
            place = int(operands[1].split("[")[2].rstrip("]"), 16)
            high = source(f"c[0x0][{hex(place + 4)}]", block)

            def both(w: Warp) -> None:
                put(w, high(w) << 32 | low(w))

            return both
    else:
        put, get = target(operands[0]), source(operands[-1], block)
    mask = 0xFF if "U8" in i.modifiers else ~0

    def do(w: Warp) -> None:
        try:
            put(w, get(w) & mask)
        except TypeError:
            put(w, None)

    return do


def _to_uniform(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    outs = [target_predicate(o) for o in operands if is_predicate(o)]
    rest = [o for o in operands if not is_predicate(o)]
    put, get = target(rest[0]), source(rest[1], block)

    def do(w: Warp) -> None:
        try:
            put(w, get(w))
        except TypeError:
            put(w, None)
        for out in outs:
            out(w, False)

    return do


def _special(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    put, name = target(operands[0]), operands[1]
    x, y, z = block.launch.block
    fixed = {
        "SR_CTAID.X": x,
        "SR_CTAID.Y": y,
        "SR_CTAID.Z": z,
        "SR_CgaCtaId": 0,
        "SR_LANEID": 0,
        "SR_LTMASK": 0,
        "SR_TID.Y": 0,
        "SR_TID.Z": 0,
        "SR_CgaSize": 1,
        "SR_SWINHI": 0,
    }

    def do(w: Warp) -> None:
        put(w, 32 * w.number if name == "SR_TID.X" else fixed[name])

    if name != "SR_TID.X" and name not in fixed:
        raise KeyError(name)
    return do


def _vote(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    value = predicate(operands[-1])
    if is_predicate(operands[0]):
        out = target_predicate(operands[0])

        def to_predicate(w: Warp) -> None:
            out(w, bool(value(w)))

        return to_predicate
    put = target(operands[0])

    def to_register(w: Warp) -> None:
        put(w, int(value(w)))

    return to_register


def _elect(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    out = target_predicate(operands[0])
    return lambda w: out(w, True)


def _shuffle(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    """The value of the warp's first thread, whichever was asked for."""
    return _move(i, [operands[1], operands[2]], labels, block)


def _p2r(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    put, mask = target(operands[0]), int(operands[3], 16)

    def do(w: Warp) -> None:
        put(w, sum(int(bit) << n for n, bit in enumerate(w.p[:7])) & mask)

    return do


def _r2p(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    get, mask = source(operands[1], block), int(operands[2], 16)

    def do(w: Warp) -> None:
        try:
            bits = get(w) or 0
        except TypeError:
            bits = 0
        for n in range(7):
            if mask >> n & 1:
                w.p[n] = bool(bits >> n & 1)

    return do


def _reciprocal(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    if "RCP" not in i.modifiers:
        return _computed([operands[0], "?"], lambda x: x, block, 1)
    return _computed(operands, lambda x: as_bits(1.0 / as_float(x)), block, 1)


def _branch(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    if "DIV" in i.modifiers:  # a warp's threads stay together
        return sass_sharing.nothing
    label = operands[-1].strip("`()")
    there = labels[label]
    conditions = [predicate(o) for o in operands[:-1] if is_predicate(o)]

    def do(w: Warp) -> int | None:
        return there if all(c(w) for c in conditions) else None

    return do


def _permute(a: int, selector: int, b: int) -> int:
    """Four bytes out of the eight of b and a; a selector's upper bit repeats a byte's sign."""
    bytes_ = [(b << 32 | a) >> 8 * n & 0xFF for n in range(8)]
    found = 0
    for place in range(4):
        nibble = selector >> 4 * place & 0xF
        byte = bytes_[nibble & 7]
        if nibble & 8:
            byte = 0xFF if byte & 0x80 else 0
        found |= byte << 8 * place
    return found


def _call(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    """A far jump to a label of the kernel; a function of the compiler's own, the slow way of a
    reciprocal, changes nothing that is followed here."""
    there = labels.get(operands[-1].strip("`()"))
    return sass_sharing.nothing if there is None else lambda w: there


def _exit(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    return lambda w: FINISHED


def _constant(i: Instruction, operands: list[str], labels: Mapping[str, int], block: Block) -> Do:
    """An argument; elsewhere in the constant bank lies what depends on a register."""
    known = operands[1].startswith("c[")
    return (_move if known else sass_sharing.load)(i, operands, labels, block)


_MAKERS: dict[str, Maker] = {
    **dict.fromkeys(("IADD3", "UIADD3", "VIADD", "IADD"), _add3),
    **dict.fromkeys(("IMAD", "UIMAD"), _multiply_add),
    **dict.fromkeys(("LEA", "ULEA"), _lea),
    **dict.fromkeys(("SHF", "USHF"), _shift),
    **dict.fromkeys(("ISETP", "UISETP"), _compare),
    **dict.fromkeys(("FSETP", "DSETP"), _compare_floats),
    **dict.fromkeys(("LOP3", "ULOP3"), _lop3),
    **dict.fromkeys(("PLOP3", "UPLOP3"), _plop3),
    **dict.fromkeys(("SEL", "USEL"), _select),
    **dict.fromkeys(("VIMNMX", "VIMNMX3", "VIADDMNMX", "IMNMX", "UIMNMX"), _minmax),
    **dict.fromkeys(("MOV", "UMOV", "CS2R", "ULDC"), _move),
    **dict.fromkeys(("S2R", "S2UR"), _special),
    **dict.fromkeys(("VOTE", "VOTEU"), _vote),
    **dict.fromkeys(("LDS", "LDG", "LDL"), sass_sharing.load),
    **dict.fromkeys(("STS", "STL"), sass_sharing.store),
    **dict.fromkeys(("UTMALDG", "UTMASTG"), sass_sharing.copy_tensor),
    **dict.fromkeys(("UBLKCP", "UBLKRED"), sass_sharing.copy_bulk),
    "R2UR": _to_uniform,
    "P2R": _p2r,
    "R2P": _r2p,
    "ELECT": _elect,
    "SHFL": _shuffle,
    "MUFU": _reciprocal,
    "BRA": _branch,
    "CALL": _call,
    "EXIT": _exit,
    "BAR": sass_sharing.named_barrier,
    "SYNCS": sass_sharing.syncs,
    "LDC": _constant,
    **dict.fromkeys(("RED", "REDG"), sass_sharing.add),
    "LDGSTS": sass_sharing.copy_by_warp,
    "LDGDEPBAR": sass_sharing.end_of_copies,
    "ATOMG": sass_sharing.atomic,
    "USETMAXREG": sass_sharing.granted,
    "RET": _exit,
    **dict.fromkeys(("PRMT", "UPRMT"), _simple(_permute, 3)),
    "IABS": _simple(lambda x: abs(signed(x)), 1),
    "POPC": _simple(lambda x: bin(x).count("1"), 1),
    "UPOPC": _simple(lambda x: bin(x).count("1"), 1),
    "FLO": _simple(lambda x: x.bit_length() - 1, 1),
    "UFLO": _simple(lambda x: x.bit_length() - 1, 1),
    **dict.fromkeys(("I2F", "I2FP"), _simple(lambda x: as_bits(float(signed(x))), 1)),
    "F2I": _simple(lambda x: max(0, min(MASK, int(as_float(x)))), 1),
}
