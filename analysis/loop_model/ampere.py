"""Every number the model of an A100's SM uses, with unit and source. None is fitted to attention
times, and none was chosen after a look at those of FlashAttention-2.

Sources as in ``analysis.loop_model.parameters``, and:

spec     NVIDIA, A100 white paper, and CUDA C++ Programming Guide, throughput for capability 8.0
luo      the same logs, of an A100: loads that chase pointers through L2
accelsim Accel-Sim, configurations NVIDIA_A100_80GB_PCIe and SM80_A100
huerta   of an RTX A6000, the same generation
hopper   published for an H100 alone and taken over
assumed  published by nobody; what follows from it is said where it matters
"""

from __future__ import annotations

from analysis.loop_model.parameters import Machine, Operation, Parameter, Pick, Unit

SM80: dict[str, Parameter] = {
    "bank_ports": Parameter(1, "warp registers a clock and bank", "huerta", "two banks, 1024 bits each"),
    "shared_bytes": Parameter(128, "bytes a clock", "spec", "for accesses and copies"),
    "copy_bytes": Parameter(47, "bytes a clock", "spec", "5120 bytes a clock of L2 over 108 SMs"),
    "copy_latency": Parameter(203, "clocks", "luo", "L2 hit, near half: 202.8"),
    "copy_far": Parameter(406, "clocks", "luo", "L2 hit, far half: 393 to 419"),
    "named_release": Parameter(30, "clocks", "hopper", "last arrival to release"),
    "jump": Parameter(12, "clocks", "hopper", "taken branch"),
    "xu_queue": Parameter(1, "instructions", "hopper", "one may wait while the unit is busy"),
    "source_hold": Parameter(12, "clocks", "huerta", "until a store has read its sources"),
    "add_bytes": Parameter(47, "bytes a clock", "assumed", "L2 adds to as many sectors a clock as it delivers"),
}

MACHINE = Machine(SM80, Pick.GREEDY)
"""Schedulers of this generation issue the warp that issued last, and else the youngest (huerta)."""

_FMA = Operation(Unit.FMA, 2)
_ALU = Operation(Unit.ALU, 2)
_UNIFORM = Operation(Unit.UNIFORM, 1)
_NONE = Operation(Unit.ISSUE_ONLY)

#: Clocks between instructions of a warp and scheduler: 32 lanes over the lanes a quarter SM has.
#: FP32, integer, logic and compare 64 lanes an SM, special functions 16, SHFL 32 (spec); integer
#: products run on the FP32 pipe (Abdelkhalik et al., arXiv 2208.11174). F2FP carries no counter in
#: compiled code, so it runs at a fixed latency on the ALU's lanes (code).
#: Latencies: MUFU 23, shared memory 29, L1 37 (accelsim); LDC 29, SHFL 26, sources of STS held 12,
#: of STG 14 (huerta); L2 203 (luo). Taken as those of their like: S2R, S2UR and R2UR, whose results
#: have counters here, as LDC; RED and LDGSTS hold their sources as STG does.
#: HMMA is that of shape 16816: 2,048 multiply-adds at 256 a clock of a quarter SM (spec: 1,024 an
#: SM); the compiler spaces them alike (code).
OPERATIONS: dict[str, Operation] = {
    **dict.fromkeys(("FFMA", "FMUL", "FADD", "IMAD"), _FMA),
    **dict.fromkeys(
        [
            "FMNMX",
            "FSEL",
            "FSETP",
            "F2FP",
            "ISETP",
            "IADD3",
            "LOP3",
            "PLOP3",
            "SHF",
            "LEA",
            "SEL",
            "MOV",
            "IABS",
            "IMNMX",
            "PRMT",
            "P2R",
            "R2P",
            "CS2R",
            "VOTE",
            "HADD2",
            "HMUL2",
            "HFMA2",
        ],
        _ALU,
    ),
    **dict.fromkeys(("MUFU", "I2F", "F2I", "POPC", "FLO", "F2F"), Operation(Unit.XU, 8, 23)),
    **dict.fromkeys(
        [
            "UIADD3",
            "UMOV",
            "ULOP3",
            "ULEA",
            "USHF",
            "UISETP",
            "USEL",
            "UIMAD",
            "UPLOP3",
            "ULDC",
            "UFLO",
            "UPOPC",
            "VOTEU",
            "UIMNMX",
        ],
        _UNIFORM,
    ),
    **dict.fromkeys(
        ["NOP", "BRA", "EXIT", "RET", "CALL", "BSSY", "BSYNC", "YIELD", "WARPSYNC", "BREAK", "BAR", "LDGDEPBAR"], _NONE
    ),
    **dict.fromkeys(("LDC", "S2R", "S2UR", "R2UR"), Operation(Unit.MEMORY, 2, 29)),
    "SHFL": Operation(Unit.MEMORY, 4, 26),
    "LDS": Operation(Unit.MEMORY, 2, 29),
    "LDSM": Operation(Unit.MEMORY, 4, 29),
    "STS": Operation(Unit.MEMORY, 2, 12),
    "LDG": Operation(Unit.MEMORY, 4, 203),
    "STG": Operation(Unit.MEMORY, 4, 14),
    "LDGSTS": Operation(Unit.MEMORY, 4, 14),
    "RED": Operation(Unit.MEMORY, 4, 14),
    "LDL": Operation(Unit.MEMORY, 4, 37),
    "STL": Operation(Unit.MEMORY, 4, 14),
    "HMMA": Operation(Unit.WARP_TENSOR, 8),
    "DEPBAR": Operation(Unit.COUNTER_WAIT),
}
