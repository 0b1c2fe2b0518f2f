"""What the executor understands: every opcode, its operands' order, and each modifier's meaning.

The one place that says so: the decoder refuses what is not here, and the page
``docs/pages/machine-code.md`` is made from it.

An operand pattern is a word of letters. ``d`` target register, ``p`` target predicate, ``a``
``b`` ``c`` sources, ``q`` predicate that comes in, ``m`` ``x`` addresses, ``s`` ``t`` immediates,
``L`` label, ``B`` ``k`` convergence barrier, ``S`` special register, ``-`` ignored. ``?`` behind a
letter: may be missing. The first pattern that fits counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Sets = Mapping[int, int]


@dataclass(frozen=True)
class Opcode:
    """How an opcode is decoded.

    operation: of ``native/machine.cpp``.
    patterns: orders of operands.
    modifiers: name -> what it writes into the instruction's ``mod`` bytes.
    preset: written first.
    numbers: how a decimal immediate is read: "int", "float", "double", "half".
    source: where the meaning is documented.
    """

    operation: str
    patterns: tuple[str, ...]
    modifiers: Mapping[str, Sets] = field(default_factory=dict)
    preset: Sets = field(default_factory=dict)
    numbers: str = "int"
    source: str = "PTX ISA"


IGNORED: Sets = {}


def _nothing(*names: str) -> dict[str, Sets]:
    return dict.fromkeys(names, IGNORED)


def _values(slot: int, *names: str) -> dict[str, Sets]:
    """Names that write 0, 1, 2 … into a slot; "" is a value without a name."""
    return {name: {slot: value} for value, name in enumerate(names) if name}


_COMPARE = ("F", "LT", "EQ", "LE", "GT", "NE", "GE", "NUM", "NAN", "LTU", "EQU", "LEU", "GTU", "NEU", "GEU", "T")
_COMBINE = ("AND", "OR", "XOR")
_ROUNDING = ("RN", "RM", "RP", "RZ")
_WHOLE = ("RN", "FLOOR", "CEIL", "TRUNC")

_NAK = "Mesa NAK's fold functions"
_NOTES = "public sm_90 notes"
_HALF_MODS = {"MMA": IGNORED, "BF16_V2": {0: 1}, "FTZ": {1: 1}, "SAT": {2: 1}, "RELU": {3: 1}, "F32": {4: 1}}
_FLOAT_MODS = {"FTZ": {0: 1}, **_values(1, *_ROUNDING), "SAT": {2: 1}}

_CACHE = _nothing(
    "E",
    "CONSTANT",
    "STRONG",
    "WEAK",
    "GPU",
    "SYS",
    "CTA",
    "SM",
    "VC",
    "PRIVATE",
    "LTC64B",
    "LTC128B",
    "LTC256B",
    "EF",
    "EL",
    "LU",
    "NA",
    "EU",
    "BYPASS",
    "ACCESS",
    "MMIO",
    "ENL2",
)
_SIZES = {
    **_CACHE,
    **{"U8": {0: 1}, "S8": {0: 2}, "U16": {0: 3}, "S16": {0: 4}, "32": {0: 0}, "64": {0: 5}, "128": {0: 6}},
    **{name: {1: 1} for name in ("GPU", "SYS", "BYPASS")},
}
_ATOMIC = {
    **_CACHE,
    **_values(0, "ADD", "MIN", "MAX", "INC", "DEC", "AND", "OR", "XOR", "EXCH", "CAS"),
    "CAST": {0: 11},
    "SPIN": IGNORED,
    **_values(1, "U32", "S32", "U64", "S64", "F32", "F64", "F16x2", "BF16_V2"),
    "32": {1: 0},
    "64": {1: 2},
    "F32x2": {1: 4, 2: 2},
    "F32x4": {1: 4, 2: 4},
    **_nothing("FTZ", "RN"),
}
_SET_INTEGER = {**_values(0, *_COMPARE[:7]), **_values(1, *_COMBINE), "U32": {2: 1}, "EX": {3: 1}}
_SET_DOUBLE = {**_values(0, *_COMPARE), **_values(1, *_COMBINE), "MIN": {2: 1}, "MAX": {2: 2}}
_SET_FLOAT = {**_values(0, *_COMPARE), **_values(1, *_COMBINE), "FTZ": {2: 1}, "BF": {3: 1}}
_SET_HALF = {
    **_values(2, *_COMPARE),
    **_values(3, *_COMBINE),
    "BF16_V2": {0: 1},
    "FTZ": {1: 1},
    "BF": {4: 1},
    "H_AND": {5: 1},
}


def _with_uniform(table: dict[str, Opcode]) -> dict[str, Opcode]:
    return {**table, **{f"U{name}": opcode for name, opcode in table.items()}}


_INTEGER = {
    "IADD3": Opcode("IADD3", ("dp?p?abcq?q?",), {"X": {0: 1}, "64": {1: 1}}, source=_NAK),
    "IMAD": Opcode(
        "IMAD",
        ("dp?abcq?",),
        {"MOV": IGNORED, "IADD": IGNORED, "SHL": IGNORED, "WIDE": {0: 1}, "HI": {0: 2}, "U32": {1: 1}, "X": {2: 1}},
        source=_NOTES,
    ),
    "LEA": Opcode("LEA", ("dp?abcsq?", "dp?absq?"), {"HI": {0: 1}, "X": {1: 1}, "SX32": {2: 1}}, source=_NAK),
    "SHF": Opcode(
        "SHF",
        ("dabc",),
        {
            "L": {0: 0},
            "R": {0: 1},
            "HI": {1: 1},
            "S32": {2: 1},
            "U32": IGNORED,
            "S64": {2: 1, 3: 1},
            "U64": {3: 1},
            "W": {4: 1},
        },
        source=_NAK,
    ),
    "LOP3": Opcode("LOP3", ("dabcsq?", "pdabcsq?"), {"LUT": IGNORED, "PAND": {0: 1}}, source=_NAK),
    "PLOP3": Opcode("PLOP3", ("ppABCts",), {"LUT": IGNORED}, source=_NAK),
    "PRMT": Opcode("PRMT", ("dabc",), _values(0, "IDX", "F4E", "B4E", "RC8", "ECL", "ECR", "RC16"), source=_NAK),
    "SEL": Opcode("SEL", ("dabq",)),
    "MOV": Opcode("MOV", ("da", "da-"), {"64": {0: 1}}),
    "ISETP": Opcode("ISETP", ("ppabqq?",), _SET_INTEGER, source=_NAK),
    "POPC": Opcode("POPC", ("da",)),
    "FLO": Opcode("FLO", ("dp?a",), {"U32": {0: 1}, "SH": {1: 1}}, source=_NAK),
    "BREV": Opcode("BREV", ("da",)),
    "BMSK": Opcode("BMSK", ("dab",), {"W": {0: 1}, "C": IGNORED}, source=_NAK),
    "SGXT": Opcode("SGXT", ("dab",), {"U32": {0: 1}, "W": {1: 1}}, source=_NAK),
    "IMNMX": Opcode("IMNMX", ("dabq",), {"U32": {0: 1}, "S32": IGNORED}),
}

_OTHER_INTEGER = {
    "IADD": Opcode("IADD3", ("dabq?",), {"64": {1: 1}}),
    "VIADD": Opcode("IADD3", ("dab",), {"16x2": {2: 1}}, source=_NOTES),
    "IABS": Opcode("IABS", ("da",)),
    "VIMNMX": Opcode(
        "IMNMX", ("dabq",), {"U32": {0: 1}, "S32": IGNORED, "RELU": {2: 1}, "S16x2": {3: 1}, "U16x2": {0: 1, 3: 1}}
    ),
    "VABSDIFF": Opcode("VABSDIFF", ("dabc",), {"U32": {0: 1}}, source="PTX ISA (sad)"),
    "VIMNMX3": Opcode("IMNMX", ("dabcqq?",), {"U32": {0: 1}, "RELU": {2: 1}}, {1: 2}),
    "VIADDMNMX": Opcode("IMNMX", ("dabcq",), {"U32": {0: 1}, "RELU": {2: 1}}, {1: 1}, source=_NOTES),
    "IDP": Opcode("IDP", ("dabc",), {"4A": {0: 4}, "S8": IGNORED, "U8": IGNORED}, source="PTX ISA (dp4a)"),
    "VOTE": Opcode("VOTE", ("dpq", "pq", "dq"), _values(0, "ANY", "ALL", "EQ")),
    "VOTEU": Opcode("VOTE", ("dpq", "pq", "dq"), _values(0, "ANY", "ALL", "EQ"), source=_NOTES),
    "SHFL": Opcode("SHFL", ("pdabc",), _values(0, "IDX", "UP", "DOWN", "BFLY")),
    "MATCH": Opcode("MATCH", ("pda", "da"), {"ANY": {0: 0}, "ALL": {0: 1}, "U64": {1: 1}}),
    "REDUX": Opcode("REDUX", ("da",), {**_values(0, "AND", "OR", "XOR", "SUM", "MIN", "MAX"), "S32": {1: 1}}),
    "R2UR": Opcode("R2UR", ("da", "pda"), source=_NOTES),
    "ELECT": Opcode("ELECT", ("pd-",), source=_NOTES),
}
_OTHER_INTEGER |= {
    "P2R": Opcode("P2R", ("d-ab",), {"B0": {0: 0}, "B1": {0: 1}, "B2": {0: 2}, "B3": {0: 3}}, source=_NOTES),
    "R2P": Opcode("R2P", ("-ab",), source=_NOTES),
}

_FLOAT = {
    "FADD": Opcode("FADD", ("dab",), _FLOAT_MODS, numbers="float"),
    "FMUL": Opcode("FMUL", ("dab",), _FLOAT_MODS, numbers="float"),
    "FFMA": Opcode("FFMA", ("dabc",), _FLOAT_MODS, numbers="float"),
    "FMNMX": Opcode("FMNMX", ("dabq",), {"FTZ": {0: 1}, "NAN": {1: 1}}, numbers="float"),
    "FSEL": Opcode("SEL", ("dabq",), {"FTZ": IGNORED}, {0: 1}, numbers="float"),
    "FSETP": Opcode("FSETP", ("ppabq",), _SET_FLOAT, numbers="float"),
    "FSET": Opcode("FSET", ("dabq",), _SET_FLOAT, numbers="float"),
    "FCHK": Opcode("FCHK", ("pab",), {"DIVIDE": IGNORED}, numbers="float", source="either way gives the same quotient"),
    "DADD": Opcode("DADD", ("dab",), _values(1, *_ROUNDING), numbers="double"),
    "DMUL": Opcode("DMUL", ("dab",), _values(1, *_ROUNDING), numbers="double"),
    "DFMA": Opcode("DFMA", ("dabc",), _values(1, *_ROUNDING), numbers="double"),
    "DSETP": Opcode("DSETP", ("ppabq",), _SET_DOUBLE, numbers="double"),
    "MUFU": Opcode(
        "MUFU",
        ("da",),
        _values(0, "COS", "SIN", "EX2", "LG2", "RCP", "RSQ", "RCP64H", "RSQ64H", "SQRT", "TANH"),
        numbers="float",
        source="PTX ISA's error bounds; bits not known",
    ),
    "F2F": Opcode("F2F", ("da",), {**_values(2, *_ROUNDING), "FTZ": {3: 1}}, numbers="float"),
    "FRND": Opcode(
        "FRND", ("da",), {**_values(2, *_WHOLE), "FTZ": {3: 1}, "F64": {0: 1}, "F16": {0: 2}}, numbers="float"
    ),
    "F2I": Opcode("F2I", ("da",), {**_values(2, *_WHOLE), "NTZ": {3: 1}, "FTZ": {4: 1}}, numbers="float"),
    "I2F": Opcode("I2F", ("da",), _values(2, *_ROUNDING)),
    "I2FP": Opcode("I2F", ("da",), _values(2, *_ROUNDING)),
    "HADD2": Opcode("HADD2", ("dab",), _HALF_MODS, numbers="half"),
    "HMUL2": Opcode("HMUL2", ("dab",), _HALF_MODS, numbers="half"),
    "HFMA2": Opcode("HFMA2", ("dabc",), _HALF_MODS, numbers="half"),
    "HMNMX2": Opcode("HMNMX2", ("dabq",), {"BF16_V2": {0: 1}, "FTZ": {1: 1}, "NAN": {2: 1}}, numbers="half"),
    "HSETP2": Opcode("HSETP2", ("ppabq",), _SET_HALF, numbers="half"),
    "HSET2": Opcode("HSET2", ("dabq",), _SET_HALF, numbers="half"),
    "F2FP": Opcode(
        "F2FP",
        ("dabc", "dab", "da"),
        {
            "PACK_AB": IGNORED,
            "PACK_AB_MERGE_C": {3: 1},
            "PACK_B": IGNORED,
            "UNPACK_B": IGNORED,
            "SATFINITE": IGNORED,
            "RELU": {2: 1},
            **_values(1, *_ROUNDING),
        },
        numbers="float",
        source=f"{_NAK} (order of the halves), PTX ISA",
    ),
}

_MEMORY = {
    "LDG": Opcode("LDG", ("dm", "pdm"), _SIZES),
    "STG": Opcode("STG", ("ma",), _SIZES),
    "LDS": Opcode("LDS", ("dm",), {**_SIZES, "U": IGNORED}),
    "STS": Opcode("STS", ("ma",), _SIZES),
    "LDL": Opcode("LDL", ("dm",), _SIZES),
    "STL": Opcode("STL", ("ma",), _SIZES),
    "LD": Opcode("LD", ("dm", "pdm"), _SIZES),
    "ST": Opcode("ST", ("ma",), _SIZES),
    "LDC": Opcode("LDC", ("da",), _SIZES),
    "ULDC": Opcode("LDC", ("da",), _SIZES),
    "LDGSTS": Opcode("LDGSTS", ("mxq?",), {**_SIZES, "ZFILL": IGNORED}, source=_NOTES),
    "LDGDEPBAR": Opcode("LDGDEPBAR", ("",), source=_NOTES),
    "ARRIVES": Opcode(
        "ARRIVES",
        ("m", "-m"),
        {"LDGSTSBAR": IGNORED, "64": IGNORED, "TRANSCNT": {0: 1}, "ARVCNT": IGNORED},
        source=_NOTES,
    ),
    "ATOM": Opcode("ATOM", ("pdmab", "pdma", "dmab", "dma"), _ATOMIC),
    "ATOMG": Opcode("ATOMG", ("pdmab", "pdma", "dmab", "dma"), _ATOMIC),
    "ATOMS": Opcode("ATOMS", ("dmab", "dma", "dm"), _ATOMIC),
    "RED": Opcode("ATOMG", ("ma",), _ATOMIC),
    "REDG": Opcode("ATOMG", ("ma",), _ATOMIC),
    "LDSM": Opcode("LDSM", ("dm",), {"16": IGNORED, "M88": {0: 1}, "MT88": {0: 1, 1: 1}, "2": {0: 2}, "4": {0: 4}}),
    "STSM": Opcode("STSM", ("ma",), {"16": IGNORED, "M88": {0: 1}, "MT88": {0: 1, 1: 1}, "2": {0: 2}, "4": {0: 4}}),
    "MOVM": Opcode("MOVM", ("da",), {"16": IGNORED, "MT88": IGNORED}),
}

_CONTROL = {
    "BRA": Opcode("BRA", ("qL", "L")),
    "BRX": Opcode("BRX", ("as",), preset={0: 1}, source=_NOTES),
    "CALL": Opcode("CALL", ("L",), {"REL": IGNORED, "NOINC": IGNORED}, source=_NOTES),
    "RET": Opcode("RET", ("aL",), {"REL": IGNORED, "NODEC": IGNORED}, source=_NOTES),
    "EXIT": Opcode("EXIT", ("",)),
    "BSSY": Opcode("BSSY", ("BL",), {"RECONVERGENT": IGNORED, "RELIABLE": IGNORED}, source=_NOTES),
    "BSYNC": Opcode("BSYNC", ("B",), {"RECONVERGENT": IGNORED, "RELIABLE": IGNORED}, source=_NOTES),
    "BREAK": Opcode("BREAK", ("B",), {"RELIABLE": IGNORED}, source=_NOTES),
    "WARPSYNC": Opcode(
        "WARPSYNC", ("aL", "a", ""), {"ALL": {0: 1}, "COLLECTIVE": IGNORED, "EXCLUSIVE": IGNORED}, source=_NOTES
    ),
    "BMOV": Opcode("BMOV_FROM", ("dk", "ka"), {"32": IGNORED, "CLEAR": {0: 1}}, source=_NOTES),
    "BAR": Opcode(
        "BAR",
        ("q?", "abq?", "aq?"),
        {
            "SYNC": {0: 0},
            "ARV": {0: 1},
            "DEFER_BLOCKING": IGNORED,
            "RED": IGNORED,
            "POPC": {0: 2},
            "AND": {0: 3},
            "OR": {0: 4},
        },
    ),
    "B2R": Opcode("B2R", ("dp", "d"), {"RESULT": IGNORED}),
    "S2R": Opcode("S2R", ("dS",)),
    "S2UR": Opcode("S2R", ("dS",)),
    "CS2R": Opcode("S2R", ("dS",), {"32": {0: 0}}, {0: 1}),
    "LEPC": Opcode("LEPC", ("d",), source=_NOTES),
    "BPT": Opcode("KILL", ("s?",), {"TRAP": IGNORED}),
    "KILL": Opcode("KILL", ("",)),
    "DEPBAR": Opcode("DEPBAR", ("-s-?", "-"), {"LE": IGNORED}, source=_NOTES),
}

_HOPPER = {
    "SYNCS": Opcode(
        "SYNCS",
        ("pma", "pdma", "dma", "ma", "m"),
        {
            "EXCH": {0: 0},
            "PHASECHK": {0: 1},
            "ARRIVE": {0: 2, 1: 1, 2: 1},
            "TRANS64": IGNORED,
            "TRYWAIT": IGNORED,
            "64": IGNORED,
            "A1T0": {1: 1, 2: 0},
            "A0TR": {1: 0, 2: 1},
            "A1TR": {1: 1, 2: 1},
            "CCTL": {0: 3},
            "IV": IGNORED,
        },
        source=_NOTES,
    ),
    "UTMALDG": Opcode("UTMALDG", ("mx-?",), {f"{n}D": {0: n} for n in range(1, 6)}, source=_NOTES),
    "UTMASTG": Opcode(
        "UTMASTG", ("mx-?",), {f"{n}D": {0: n} for n in range(1, 6)}, source="public simulator's reading, in part"
    ),
    "UTMAREDG": Opcode(
        "UTMASTG",
        ("mx-?",),
        {**{f"{n}D": {0: n} for n in range(1, 6)}, "ADD": {1: 1}},
        source="public simulator's reading, in part",
    ),
    "UBLKCP": Opcode("UBLKCP", ("mxa",), {"S": {0: 0}, "G": {0: 1}}, source="public simulator's reading, in part"),
    "UBLKRED": Opcode(
        "UBLKCP",
        ("mxa",),
        {"G": {0: 2}, "S": IGNORED, "ADD": IGNORED, "F32": IGNORED, "RN": IGNORED},
        source="public simulator's reading, in part",
    ),
    "FENCE": Opcode(
        "FENCE_ASYNC",
        ("",),
        dict.fromkeys(("VIEW", "ASYNC", "S", "G", "T"), IGNORED),
        source="PTX ISA (fence.proxy.async)",
    ),
    "UTMACMDFLUSH": Opcode("UTMACMDFLUSH", ("",), source=_NOTES),
    "WARPGROUP": Opcode("WARPGROUP", ("-s", ""), {"ARRIVE": {0: 0}, "DEPBAR": {0: 1}, "LE": IGNORED}, source=_NOTES),
    "USETMAXREG": Opcode(
        "SETMAXREG", ("ps", "s"), {"DEALLOC": IGNORED, "TRY_ALLOC": IGNORED, "CTAPOOL": IGNORED}, source=_NOTES
    ),
}

_WITHOUT_EFFECT = {
    name: Opcode("NOP", ("", "-", "--", "---"), dict.fromkeys(modifiers, IGNORED), source=why)
    for name, modifiers, why in (
        ("NOP", (), "nothing"),
        ("YIELD", (), "a hint"),
        ("MEMBAR", ("ALL", "SC", "CTA", "GPU", "SYS", "VC"), "memory is not modelled as weak"),
        ("ERRBAR", (), "memory is not modelled as weak"),
        ("CGAERRBAR", (), "memory is not modelled as weak"),
        ("CCTL", ("IVALL", "E", "PF2", "IV", "C", "LDC", "PF1"), "no caches are modelled"),
        ("UCCTL", ("IVALL",), "no caches are modelled"),
        ("ACQBULK", (), "kernels run one after another"),
        ("PREEXIT", (), "kernels run one after another"),
        ("NANOSLEEP", (), "time is not modelled"),
        ("UTMACCTL", ("PF",), "no caches are modelled"),
        ("UTMAPF", ("L2",), "no caches are modelled"),
        ("ENDCOLLECTIVE", (), "the end of a WARPSYNC.COLLECTIVE"),
        ("WARPGROUPSET", (), "a hint"),
    )
}

_PRODUCTS = {
    name: Opcode(name, (), {}, source="aligned truncation, checked with vectors of cards") for name in ("HMMA", "HGMMA")
}

OPCODES: dict[str, Opcode] = {
    **_with_uniform(_INTEGER),
    **_OTHER_INTEGER,
    **_FLOAT,
    **_MEMORY,
    **_CONTROL,
    **_HOPPER,
    **_WITHOUT_EFFECT,
    **_PRODUCTS,
}

SPECIAL_REGISTERS = (
    "SR_TID.X",
    "SR_TID.Y",
    "SR_TID.Z",
    "SR_CTAID.X",
    "SR_CTAID.Y",
    "SR_CTAID.Z",
    "SR_LANEID",
    "SR_VIRTID",
    "SR_CLOCKLO",
    "SR_CLOCKHI",
    "SR_EQMASK",
    "SR_LTMASK",
    "SR_LEMASK",
    "SR_GTMASK",
    "SR_GEMASK",
    "SRZ",
    "SR_CgaCtaId",
    "SR_SWINHI",
    "SR_NCTAID.X",
    "SR_NCTAID.Y",
    "SR_NCTAID.Z",
    "SR_NTID.X",
    "SR_NTID.Y",
    "SR_NTID.Z",
    "SR_GLOBALTIMERLO",
    "SR_GLOBALTIMERHI",
    "SR_VIRTUALSMID",
    "SR_TID",
    "SR_CgaSize",
)
"""In the order of ``native/control.hpp``."""

TYPES = {"F32": 0, "F64": 1, "F16": 2, "BF16": 3}
WHOLE_TYPES = {name: k for k, name in enumerate(("S32", "U32", "S64", "U64", "S16", "U16", "S8", "U8"))}
