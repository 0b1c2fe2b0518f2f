"""What a GPU is to the formulas: sizes, rates and the origin of every figure.

Rates are peaks at the boost clock, dense (no structured sparsity). A rate that follows from the
microarchitecture (units per SM and clock) is derived here rather than typed, so that it can be
checked: ``exp_per_s`` and ``shared_bandwidth_bytes_per_s`` reproduce the 3.9 T/s and 31 TB/s of
FlashAttention-3, Table 1, and the 19 TB/s of FlashAttention 2022, §2.1.

A measured ceiling, where there is one, replaces these figures in a time prediction; see
``analysis.time_model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

KIB = 1024
MIB = 1024 * KIB

SHARED_BYTES_PER_CLOCK_PER_SM = 128
"""32 banks of 4 bytes (CUDA programming guide, compute capability 7.5 to 9.0)."""
EXP_PER_CLOCK_PER_SM = 16
"""Special-function results per SM and clock (CUDA programming guide, throughput table)."""
TENSOR_FLOPS_PER_CLOCK_PER_SM: Mapping[tuple[int, int], int] = MappingProxyType(
    {(7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 9): 512, (9, 0): 4096, (10, 0): 8192,
     (12, 1): 1024}
)  # fmt: skip
"""Compute capability -> dense 16-bit products with fp32 sums (architecture whitepapers). The
professional cards of 8.6 and 8.9 do twice what is written here for the GeForce cards."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its maker describes it. Sizes in bytes, rates per second, clock in Hz.

    Args:
        name: as the driver reports it, without "NVIDIA".
        compute_capability: (major, minor); None for GPUs that are not NVIDIA's, where none of our
            kernels runs.
        sms: streaming multiprocessors that are switched on.
        boost_clock_hz: the clock that the other rates hold at.
        memory_bytes: what the card reports; "80 GB" as sold are 79.6 or 80 GiB.
        hbm_bandwidth_bytes_per_s: of device memory.
        l2_bytes: the reported size of L2.
        l2_partitions: 2 where L2 is split in halves, each with its own copy of what its SMs read:
            then a byte shared by all SMs takes two bytes of the reported size.
        l2_bandwidth_bytes_per_s: reads that L2 serves; None where nobody states it.
        fp16_tensor_flops: dense, with fp32 accumulation, two FLOPs a multiply-add.
        fp32_flops: outside tensor cores.
        shared_bytes_per_sm: shared memory that the blocks of an SM share.
        shared_bytes_per_block: the most that one block may have.
        shared_reserved_per_block: what the system takes from each block's share.
        registers_per_sm: 32-bit registers.
        threads_per_sm, blocks_per_sm: the most that reside on an SM.
        sources: where each figure stands, by field name.
    """

    name: str
    compute_capability: tuple[int, int] | None
    sms: int
    boost_clock_hz: float
    memory_bytes: float
    hbm_bandwidth_bytes_per_s: float
    l2_bytes: int
    l2_partitions: int
    l2_bandwidth_bytes_per_s: float | None
    fp16_tensor_flops: float
    fp32_flops: float
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    shared_reserved_per_block: int
    registers_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    sources: Mapping[str, str]
    tensor_flops_per_clock: int | None = None
    """Dense 16-bit products of an SM a clock; None: as of the compute capability."""

    @property
    def architecture(self) -> str | None:
        """What code is compiled for, without its prefix: "80" of sm_80."""
        of = self.compute_capability
        return None if of is None else f"{of[0]}{of[1]}"

    @property
    def capability_text(self) -> str:
        """ "9.0", or "none"."""
        of = self.compute_capability
        return "none" if of is None else f"{of[0]}.{of[1]}"

    @property
    def has_bf16(self) -> bool:
        """Tensor cores multiply bf16 from compute capability 8.0 on (programming guide)."""
        return self.compute_capability is None or self.compute_capability >= (8, 0)

    def require_dtype(self, dtype: str) -> None:
        """ValueError for a type that the card does not compute in."""
        if dtype == "bf16" and not self.has_bf16:
            raise ValueError(
                f"{self.name} does not compute in bf16: use fp16 or fp32 (--dtype fp16)"
            )

    @property
    def tensor_flops_per_clock_per_sm(self) -> int | None:
        """Dense 16-bit products of an SM a clock, None where they are not known."""
        if self.tensor_flops_per_clock is not None or self.compute_capability is None:
            return self.tensor_flops_per_clock
        return TENSOR_FLOPS_PER_CLOCK_PER_SM.get(self.compute_capability)

    @property
    def usable_l2_bytes(self) -> int:
        """What data shared by all SMs can occupy: half of a two-partition L2."""
        return self.l2_bytes // self.l2_partitions

    @property
    def exp_per_s(self) -> float:
        """Peak rate of exponentials (ex2.approx on the special-function units)."""
        return EXP_PER_CLOCK_PER_SM * self.sms * self.boost_clock_hz

    @property
    def shared_bandwidth_bytes_per_s(self) -> float:
        """Peak rate of shared memory, all SMs together."""
        return SHARED_BYTES_PER_CLOCK_PER_SM * self.sms * self.boost_clock_hz

    @property
    def on_chip_elements(self) -> int:
        """The papers' M in fp16 elements: the shared memory one thread block may use."""
        return self.shared_bytes_per_block // 2


REPORTED = "the total that the driver reports (nvidia-smi, rocm-smi), as published by users"
GUIDE = "CUDA C++ programming guide, technical specifications per compute capability"


def sources_of(chip: str, **others: str) -> Mapping[str, str]:
    """The origin of every field: the chip's documents and the guide, or ``others``."""
    common = {
        "sms": chip,
        "boost_clock_hz": chip,
        "memory_bytes": REPORTED,
        "hbm_bandwidth_bytes_per_s": chip,
        "l2_bytes": chip,
        "fp16_tensor_flops": chip,
        "fp32_flops": chip,
        "shared_bytes_per_sm": GUIDE,
        "shared_bytes_per_block": GUIDE,
        "shared_reserved_per_block": GUIDE,
        "registers_per_sm": GUIDE,
        "threads_per_sm": GUIDE,
        "blocks_per_sm": GUIDE,
        "l2_partitions": chip,
        "l2_bandwidth_bytes_per_s": chip,
    }
    return MappingProxyType(common | others)
