"""An SM of an H200 that runs code of warps: products of a warp (HMMA) and copies that its threads
make, as FlashAttention-2's kernels do there. None of the numbers is fitted to attention times.

Numbers and sources are those of ``analysis.loop_model.parameters``, but for

luo      pointers that loads chase through L2, without the 104.6 clocks that a tensor map adds; and
         for the rate of HMMA "on average 62.9 % of the peak" (arXiv 2501.12084, section 6.2)
flashgpu FlashGPU-Sim, docs/reproduce_fa2_fa3_cases.md: mma.sync starts every 6 clocks on an H100
code     FlashAttention-2's cubins for sm_90 in torch 2.11's wheel
assumed  published by nobody
"""

from __future__ import annotations

from analysis.loop_model import parameters
from analysis.loop_model.card import H200_SUSTAINED, copy_bytes_per_clock
from analysis.loop_model.parameters import SM90, Machine, Operation, Parameter, Pick, Unit

SMS = 132
"""That share L2."""
_TAKEN_OVER = ("bank_ports", "shared_bytes", "named_release", "jump", "xu_queue", "source_hold")
_SHARE = copy_bytes_per_clock(SM90["copy_bytes"].value, H200_SUSTAINED, SMS)

SM90_WARPS: dict[str, Parameter] = {
    **{name: SM90[name] for name in _TAKEN_OVER},
    "copy_bytes": Parameter(_SHARE, "bytes a clock", "structure", "an equal share of L2's 9.2 TB/s at 1.70 GHz"),
    "copy_latency": Parameter(264, "clocks", "luo", "L2 hit, near half"),
    "copy_far": Parameter(490, "clocks", "luo", "L2 hit, far half"),
    "add_bytes": Parameter(_SHARE, "bytes a clock", "assumed", "L2 adds to as many sectors a clock as it delivers"),
}

#: HMMA, shape 16816: the compiler puts 6 clocks between products of a warp that follow each other,
#: always (code, flashgpu). That is two thirds of what HGMMA reaches; measured were 62.9 % (luo).
#: LDGSTS and REDG hold their sources as STG does.
OPERATIONS: dict[str, Operation] = {
    **{name: of for name, of in parameters.OPERATIONS.items() if name != "HGMMA"},
    "HMMA": Operation(Unit.WARP_TENSOR, 6),
    "LDGSTS": Operation(Unit.MEMORY, 4, 14),
    "REDG": Operation(Unit.MEMORY, 4, 14),
    "LDGDEPBAR": Operation(Unit.ISSUE_ONLY),
    "UIMNMX": Operation(Unit.UNIFORM, 1),
}

MACHINE = Machine(SM90_WARPS, Pick.OLDEST)
"""Schedulers ask the oldest warp first, as for the Hopper kernels."""
