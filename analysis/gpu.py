"""What a GPU is to the formulas: sizes, rates and the origin of every figure.

Rates are peaks, dense (no structured sparsity). A rate that follows from the microarchitecture
(units per SM and clock) is derived here rather than typed, so that it can be checked:
``exp_per_s`` and ``shared_bandwidth_bytes_per_s`` reproduce the 3.9 T/s and 31 TB/s of
FlashAttention-3, Table 1, and the 19 TB/s of FlashAttention 2022, §2.1.

The cards are in ``gpus.toml``; ``analysis.gpu_file`` reads it, and files of users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB

SHARED_BYTES_PER_CLOCK_PER_SM = 128
"""32 banks of 4 bytes (CUDA programming guide, compute capability 7.5 to 9.0)."""
EXP_PER_CLOCK_PER_SM = 16
"""Special-function results per SM and clock (CUDA programming guide, throughput table)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its maker describes it. Sizes in bytes, rates per second, clocks in Hz.

    Args:
        name: as the driver reports it, without "NVIDIA".
        compute_capability: (major, minor); None for GPUs that are not NVIDIA's, where none of our
            kernels runs.
        sms: streaming multiprocessors that are switched on.
        boost_clock_hz: the highest clock that the datasheet's rates hold at.
        memory_bytes: what the card reports; "80 GB" as sold are 79.6 or 80 GiB.
        hbm_bandwidth_bytes_per_s: of device memory.
        l2_bytes: the reported size of L2.
        l2_partitions: 2 where L2 is split in halves, each with its own copy of what its SMs read:
            then a byte shared by all SMs takes two bytes of the reported size.
        l2_bandwidth_bytes_per_s: reads that L2 serves, at ``boost_clock_hz``; None where nobody
            states it.
        fp16_tensor_flops: dense, with fp32 accumulation, two FLOPs a multiply-add; as the
            datasheet prints it, at whatever clock.
        fp32_flops: outside tensor cores; likewise.
        shared_bytes_per_sm: shared memory that the blocks of an SM share.
        shared_bytes_per_block: the most that one block may have.
        shared_reserved_per_block: what the system takes from each block's share.
        registers_per_sm: 32-bit registers.
        threads_per_sm, blocks_per_sm: the most that reside on an SM.
        sources: where each figure stands, by field name.
        tensor_flops_per_clock: of an SM, dense 16-bit products with fp32 sums; None: not known.
        fma_flops_per_clock: of an SM's fp32 units; None: not known.
        load_clocks_hz: lowest and highest clock seen under load; None where nobody published it
            (``analysis.clocks``).
        short_names: other names, for people who type them.
        driver_names: the words by which a driver names the card (``analysis.hardware.find_gpu``).
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
    fma_flops_per_clock: int | None = None
    load_clocks_hz: tuple[float, float] | None = None
    short_names: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()

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
            raise ValueError(f"{self.name} does not compute in bf16: use fp16 or fp32 (--dtype fp16)")

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
