"""How many thread blocks an SM holds at once, from registers, shared memory and threads.

The rules of the CUDA occupancy calculator for compute capability 7.5 to 9.0: registers are given to
warps in units of 256, and each of an SM's four parts has a quarter of them for its own warps, so
the warps that registers allow are a multiple of four. Shared memory is given to blocks in units of
128 bytes (256 on 7.5) on top of 1 KiB that the system keeps per block from 8.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.hardware import Gpu

WARP = 32
REGISTER_UNIT = 256
PARTS = 4
"""Schedulers of an SM, each with a register file of its own."""
MAX_REGISTERS_PER_THREAD = 255
MAX_THREADS_PER_BLOCK = 1024


@dataclass(frozen=True)
class Occupancy:
    """Blocks an SM holds, and what stops it from holding one more."""

    blocks_per_sm: int
    warps_per_sm: int
    limits: dict[str, int]
    """Blocks each resource alone would allow."""

    @property
    def limited_by(self) -> str:
        return min(self.limits, key=lambda resource: self.limits[resource])


def occupancy(gpu: Gpu, *, threads: int, registers_per_thread: int, shared_bytes: int) -> Occupancy:
    """Blocks per SM. Zero blocks where the block cannot run at all; ``limits`` says why.

    Raises ValueError for a thread or register count that no block can have.
    """
    if not 1 <= threads <= MAX_THREADS_PER_BLOCK:
        raise ValueError(f"threads={threads} is outside 1..{MAX_THREADS_PER_BLOCK}")
    if not 1 <= registers_per_thread <= MAX_REGISTERS_PER_THREAD:
        raise ValueError(f"registers_per_thread={registers_per_thread} is outside 1..{MAX_REGISTERS_PER_THREAD}")
    if shared_bytes < 0:
        raise ValueError(f"shared_bytes={shared_bytes} is negative")
    warps = _ceil_to(threads, WARP) // WARP
    registers_per_warp = _ceil_to(registers_per_thread * WARP, REGISTER_UNIT)
    turing = gpu.compute_capability is not None and gpu.compute_capability < (8, 0)
    unit = 256 if turing else 128
    shared = _ceil_to(shared_bytes + gpu.shared_reserved_per_block, unit)
    by_shared = gpu.shared_bytes_per_sm // shared if shared else gpu.blocks_per_sm
    limits = {
        "registers": gpu.registers_per_sm // PARTS // registers_per_warp * PARTS // warps,
        "shared memory": by_shared if shared_bytes <= gpu.shared_bytes_per_block else 0,
        "threads": gpu.threads_per_sm // (warps * WARP),
        "blocks": gpu.blocks_per_sm,
    }
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, limits)


def wave_efficiency(gpu: Gpu, blocks: int, *, alike: bool = True) -> float:
    """Share of the SMs' time that blocks keep busy at best, (0, 1].

    alike: every block does the same. Then it is blocks a SM over those of the SM that has most.
        Blocks that differ, as under a mask, may make up for each other (five blocks of 5, 4, 3, 2
        and 1 take four SMs 5, not twice the mean of 3), so that only SMs without any block are
        sure to idle: no block ends before the mean of all.

    How many run on an SM at a time does not matter to a bound: they share what the SM does, and
    one that is alone may have all of it.

    FlashAttention 2022 launches batch · heads blocks, which leaves SMs idle below about the SM
    count (FlashAttention-2 §3.2); 1.1 blocks an SM take as long as 2.
    """
    if blocks < 1:
        raise ValueError(f"blocks={blocks} is below 1")
    if not alike:
        return min(blocks / gpu.sms, 1.0)
    return blocks / gpu.sms / -(-blocks // gpu.sms)


def _ceil_to(value: int, unit: int) -> int:
    return -(-value // unit) * unit
