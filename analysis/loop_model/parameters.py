"""Every number the model of a Hopper SM uses, with unit and source. None is fitted to attention
times. Those of an A100 are in ``analysis.loop_model.ampere``.

Sources:

spec     NVIDIA, CUDA C++ Programming Guide, arithmetic throughput for compute capability 9.0, and
         the H100 white paper
code     read from compiled kernels: control fields, registers, opcodes
huerta   Huerta et al., "Analyzing Modern NVIDIA GPU cores", arXiv 2503.20481
luo      Luo et al., Hopper microbenchmarks (HPMLL/NVIDIA-Hopper-Benchmark), H800 PCIe logs
flashgpu FlashGPU-Sim, configuration and notes of SM90_H100 and an H200 job: probes with clock64 on
         those cards; no attention kernel is in the probes used here
accelsim Accel-Sim 2.0, configuration SM90_H100
structure  a mechanism whose size nobody published; which of its sizes is used was decided on the
         first half of the prototype's variants (``repro.timing.time_validation``)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


class Unit(IntEnum):
    """What an instruction occupies; numbers as in sm.c."""

    ISSUE_ONLY = 0
    FMA = 1
    FMA_HEAVY = 2
    ALU = 3
    XU = 4
    UNIFORM = 5
    MEMORY = 6
    TENSOR = 7
    GROUP_WAIT = 8
    COUNTER_WAIT = 9
    FLUSH = 10
    WARP_TENSOR = 11


@dataclass(frozen=True)
class Operation:
    """What a warp's instruction asks of its unit.

    interval: clocks until the unit takes the next one of a scheduler.
    latency: clocks until a counter that waits for the result is lowered; results of fixed latency
        need none, the compiler's stall counts cover them.
    """

    unit: Unit
    interval: int = 1
    latency: int = 0


@dataclass(frozen=True)
class Parameter:
    """A number with its unit and where it is from."""

    value: float
    unit: str
    source: str
    note: str


class TensorOrder(IntEnum):
    """Which warpgroup's product the tensor cores take next."""

    FIRST_COME = 0
    ROUND_ROBIN = 1
    SAME_GROUP = 2


class Pick(IntEnum):
    """Which ready warp a scheduler takes."""

    OLDEST = 0
    GREEDY = 1
    IN_TURN = 2


@dataclass(frozen=True)
class Machine:
    """An SM that takes code of warps: its parameters, and the warp its schedulers pick."""

    parameters: Mapping[str, Parameter]
    pick: Pick


SM90: dict[str, Parameter] = {
    "tensor_tail": Parameter(
        43, "clocks", "flashgpu", "issue to wait of one product is 43 + N/2 clocks: 75 at N = 64, 107 at N = 128"
    ),
    "tensor_window": Parameter(6, "products an SM", "flashgpu", "admitted and not computed, with A from shared memory"),
    "tensor_ahead": Parameter(1, "products", "structure", "whose operands are fetched while another one computes"),
    "bank_ports": Parameter(1, "warp registers a clock and bank", "huerta", "two banks, 1024 bits each"),
    "tensor_register_reads": Parameter(
        1,
        "warp registers a clock and scheduler",
        "code",
        "m64nNk16 reads and writes N/2 registers a thread in N/2 clocks",
    ),
    "shared_bytes": Parameter(128, "bytes a clock", "spec", "for accesses, products and copies"),
    "copy_bytes": Parameter(64, "bytes a clock", "flashgpu", "two 32-byte sectors a clock"),
    "copy_latency": Parameter(369, "clocks", "luo", "L2 hit by TMA: 264.5 of a load and 104.6 more"),
    "copy_far": Parameter(595, "clocks", "luo", "the same from the far half of L2: about 490 and 104.6"),
    "copy_issue": Parameter(33, "clocks", "flashgpu", "one copy engine an SM"),
    "store_latency": Parameter(264, "clocks", "luo", "of L2, until a bulk store counts as written"),
    "try_wait": Parameter(36, "clocks", "flashgpu", "mbarrier.try_wait that succeeds"),
    "arrive_visible": Parameter(
        16, "clocks", "flashgpu", "an arrival is seen 52 clocks later, 36 of them the try_wait"
    ),
    "barrier_port": Parameter(2, "clocks an arrival", "flashgpu", "one port an SM"),
    "named_release": Parameter(30, "clocks", "flashgpu", "last arrival to release; a ring was measured at 37 a hop"),
    "jump": Parameter(12, "clocks", "flashgpu", "taken branch: a loop of 38 clocks against 26"),
    "xu_queue": Parameter(1, "instructions", "flashgpu", "one may wait while the unit is busy"),
    "source_hold": Parameter(12, "clocks", "huerta", "until a store has read its sources"),
}

_ALU = Operation(Unit.ALU, 2)
_HEAVY = Operation(Unit.FMA_HEAVY, 2)
_FMA = Operation(Unit.FMA, 1)
_UNIFORM = Operation(Unit.UNIFORM, 1)
_NONE = Operation(Unit.ISSUE_ONLY)

#: Clocks between instructions of a warp and scheduler: 32 lanes over the lanes a quarter SM has.
#: FP32 128 lanes an SM, integer, compare, minimum and conversion to 16 bits 64, special functions
#: 16 (spec). F2FP and I2FP never carry a counter in compiled code, so they run at a fixed latency,
#: unlike the conversions of the special-function unit (code).
#: Latencies: MUFU 18.91, LDSM every 4 clocks, a copy's issue 33, fence 8 to 13 (flashgpu); LDS 29,
#: L1 41 (accelsim); LDC 29, SHFL 26, sources of STS held 12, of STG 14 (huerta, of Ampere);
#: LDG and ATOMG one L2 hit, 264 (luo). SHFL takes 32 lanes a clock and SM (spec). Taken as those of
#: their like, since nobody published them: S2R and S2UR as LDC, SYNCS without a wait as STS.
OPERATIONS: dict[str, Operation] = {
    **dict.fromkeys(("FFMA", "FMUL", "FADD"), _FMA),
    **dict.fromkeys(("IMAD",), _HEAVY),
    **dict.fromkeys(
        [
            "FMNMX",
            "FSEL",
            "FSETP",
            "F2FP",
            "ISETP",
            "IADD3",
            "VIADD",
            "LOP3",
            "PLOP3",
            "SHF",
            "LEA",
            "SEL",
            "MOV",
            "IABS",
            "VIMNMX",
            "VIMNMX3",
            "VIADDMNMX",
            "PRMT",
            "P2R",
            "R2P",
            "CS2R",
            "HADD2",
            "HMUL2",
            "HFMA2",
            "I2FP",
        ],
        _ALU,
    ),
    **dict.fromkeys(("MUFU", "I2F", "F2I", "POPC", "FLO", "F2F"), Operation(Unit.XU, 8, 19)),
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
            "UPRMT",
        ],
        _UNIFORM,
    ),
    **dict.fromkeys(("R2UR", "VOTE", "ELECT"), _ALU),
    **dict.fromkeys(
        [
            "NOP",
            "BRA",
            "EXIT",
            "RET",
            "CALL",
            "BSSY",
            "BSYNC",
            "YIELD",
            "WARPSYNC",
            "ENDCOLLECTIVE",
            "BREAK",
            "BAR",
            "CCTL",
            "ERRBAR",
            "USETMAXREG",
            "NANOSLEEP",
            "UTMACCTL",
        ],
        _NONE,
    ),
    **dict.fromkeys(("ACQBULK", "PREEXIT", "KILL"), _NONE),
    "WARPGROUP": _NONE,
    "LDC": Operation(Unit.MEMORY, 2, 29),
    "S2R": Operation(Unit.MEMORY, 2, 29),
    "S2UR": Operation(Unit.MEMORY, 2, 29),
    "SHFL": Operation(Unit.MEMORY, 4, 26),
    "LDS": Operation(Unit.MEMORY, 2, 29),
    "LDSM": Operation(Unit.MEMORY, 4, 29),
    "STS": Operation(Unit.MEMORY, 2, 12),
    "STSM": Operation(Unit.MEMORY, 4, 12),
    "LDG": Operation(Unit.MEMORY, 4, 264),
    "STG": Operation(Unit.MEMORY, 4, 14),
    "LDL": Operation(Unit.MEMORY, 4, 41),
    "STL": Operation(Unit.MEMORY, 4, 14),
    "ATOMG": Operation(Unit.MEMORY, 4, 264),
    "SYNCS": Operation(Unit.MEMORY, 2, 12),
    "FENCE": Operation(Unit.MEMORY, 2, 13),
    "MEMBAR": Operation(Unit.MEMORY, 2, 13),
    "UTMALDG": Operation(Unit.MEMORY, 2, 33),
    "UTMASTG": Operation(Unit.MEMORY, 2, 33),
    "UTMAPF": Operation(Unit.MEMORY, 2, 33),
    "UBLKCP": Operation(Unit.MEMORY, 2, 33),
    "UBLKRED": Operation(Unit.MEMORY, 2, 33),
    "UTMACMDFLUSH": Operation(Unit.FLUSH, 1, 0),
    "HGMMA": Operation(Unit.TENSOR),
    "DEPBAR": Operation(Unit.COUNTER_WAIT),
}
GROUP_WAIT = Operation(Unit.GROUP_WAIT)
"""``WARPGROUP.DEPBAR``."""
