"""The GPUs of the papers and of our measurements, with the origin of every figure.

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
    {(7, 5): 1024, (8, 0): 2048, (8, 6): 512, (9, 0): 4096}
)
"""Compute capability -> dense 16-bit products with fp32 sums (architecture whitepapers)."""


@dataclass(frozen=True)
class Gpu:
    """Sizes in bytes, rates per second, clock in Hz.

    ``l2_partitions`` is 2 where the L2 is split in halves, each keeping its own copy of what its
    SMs read: then a byte shared by all SMs takes two bytes of the reported size.
    """

    name: str
    compute_capability: tuple[int, int]
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

    @property
    def architecture(self) -> str:
        """What code is compiled for, without its prefix: "80" of sm_80."""
        return "".join(map(str, self.compute_capability))

    @property
    def capability_text(self) -> str:
        """ "9.0"."""
        return ".".join(map(str, self.compute_capability))

    @property
    def has_bf16(self) -> bool:
        """Tensor cores multiply bf16 from compute capability 8.0 on (programming guide)."""
        return self.compute_capability >= (8, 0)

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


_GUIDE = "CUDA C++ programming guide, technical specifications per compute capability"


def _sources(chip: str, **others: str) -> Mapping[str, str]:
    common = {
        "sms": chip,
        "boost_clock_hz": chip,
        "memory_bytes": chip,
        "hbm_bandwidth_bytes_per_s": chip,
        "l2_bytes": chip,
        "fp16_tensor_flops": chip,
        "fp32_flops": chip,
        "shared_bytes_per_sm": _GUIDE,
        "shared_bytes_per_block": _GUIDE,
        "shared_reserved_per_block": _GUIDE,
        "registers_per_sm": _GUIDE,
        "threads_per_sm": _GUIDE,
        "blocks_per_sm": _GUIDE,
        "l2_partitions": chip,
        "l2_bandwidth_bytes_per_s": chip,
    }
    return MappingProxyType(common | others)


_A100 = "NVIDIA A100 Tensor Core GPU architecture whitepaper (2020) and A100 datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU architecture whitepaper (2022) and H100 SXM datasheet"

A100_40GB = Gpu(
    name="A100-SXM4-40GB",
    compute_capability=(8, 0),
    sms=108,
    boost_clock_hz=1.410e9,
    memory_bytes=40e9,
    hbm_bandwidth_bytes_per_s=1.555e12,
    l2_bytes=40 * MIB,
    l2_partitions=2,
    l2_bandwidth_bytes_per_s=5120 * 1.410e9,  # whitepaper: 5120 bytes per clock
    fp16_tensor_flops=312e12,
    fp32_flops=19.5e12,
    shared_bytes_per_sm=164 * KIB,
    shared_bytes_per_block=163 * KIB,
    shared_reserved_per_block=1 * KIB,
    registers_per_sm=65536,
    threads_per_sm=2048,
    blocks_per_sm=32,
    sources=_sources(_A100),
)

A100_80GB = Gpu(
    name="A100-SXM4-80GB",
    compute_capability=(8, 0),
    sms=108,
    boost_clock_hz=1.410e9,
    memory_bytes=80e9,
    hbm_bandwidth_bytes_per_s=2.039e12,
    l2_bytes=40 * MIB,
    l2_partitions=2,
    l2_bandwidth_bytes_per_s=5120 * 1.410e9,
    fp16_tensor_flops=312e12,
    fp32_flops=19.5e12,
    shared_bytes_per_sm=164 * KIB,
    shared_bytes_per_block=163 * KIB,
    shared_reserved_per_block=1 * KIB,
    registers_per_sm=65536,
    threads_per_sm=2048,
    blocks_per_sm=32,
    sources=_sources(_A100),
)

H100_SXM = Gpu(
    name="H100-SXM5-80GB",
    compute_capability=(9, 0),
    sms=132,
    boost_clock_hz=1.830e9,
    memory_bytes=80e9,
    hbm_bandwidth_bytes_per_s=3.35e12,
    l2_bytes=50 * MIB,
    l2_partitions=2,
    l2_bandwidth_bytes_per_s=12e12,
    fp16_tensor_flops=989.4e12,
    fp32_flops=66.9e12,
    shared_bytes_per_sm=228 * KIB,
    shared_bytes_per_block=227 * KIB,
    shared_reserved_per_block=1 * KIB,
    registers_per_sm=65536,
    threads_per_sm=2048,
    blocks_per_sm=32,
    sources=_sources(
        _H100,
        boost_clock_hz="the clock behind 989.4 TFLOP/s = 132 SMs × 4096 FLOP × 1.83 GHz, "
        "also FlashAttention-3 §2.2",
        l2_bandwidth_bytes_per_s="FlashAttention-3, Table 1",
    ),
)

H200 = Gpu(
    name="H200",
    compute_capability=(9, 0),
    sms=132,
    boost_clock_hz=1.980e9,
    memory_bytes=141e9,
    hbm_bandwidth_bytes_per_s=4.8e12,
    l2_bytes=60 * MIB,
    l2_partitions=2,
    l2_bandwidth_bytes_per_s=12e12,
    fp16_tensor_flops=989.4e12,
    fp32_flops=66.9e12,
    shared_bytes_per_sm=228 * KIB,
    shared_bytes_per_block=227 * KIB,
    shared_reserved_per_block=1 * KIB,
    registers_per_sm=65536,
    threads_per_sm=2048,
    blocks_per_sm=32,
    sources=_sources(
        "NVIDIA H200 Tensor Core GPU datasheet (2024)",
        sms="reported by the device",
        boost_clock_hz="maximum clock reported by the device; under a matrix load the power "
        "limit holds it near 1.7 GHz",
        l2_bytes="reported by the device",
        l2_partitions=_H100,
        l2_bandwidth_bytes_per_s="FlashAttention-3, Table 1 (H100, the same die)",
    ),
)

T4 = Gpu(
    name="T4",
    compute_capability=(7, 5),
    sms=40,
    boost_clock_hz=1.590e9,
    memory_bytes=16e9,
    hbm_bandwidth_bytes_per_s=320e9,
    l2_bytes=4 * MIB,
    l2_partitions=1,
    l2_bandwidth_bytes_per_s=None,
    fp16_tensor_flops=65e12,
    fp32_flops=8.1e12,
    shared_bytes_per_sm=64 * KIB,
    shared_bytes_per_block=64 * KIB,
    shared_reserved_per_block=0,
    registers_per_sm=65536,
    threads_per_sm=1024,
    blocks_per_sm=16,
    sources=_sources(
        "NVIDIA T4 datasheet and Turing architecture whitepaper (2018)",
        l2_bandwidth_bytes_per_s="not published",
    ),
)

RTX_3090 = Gpu(
    name="GeForce RTX 3090",
    compute_capability=(8, 6),
    sms=82,
    boost_clock_hz=1.695e9,
    memory_bytes=24e9,
    hbm_bandwidth_bytes_per_s=936e9,
    l2_bytes=6 * MIB,
    l2_partitions=1,
    l2_bandwidth_bytes_per_s=None,
    fp16_tensor_flops=71e12,
    fp32_flops=35.6e12,
    shared_bytes_per_sm=100 * KIB,
    shared_bytes_per_block=99 * KIB,
    shared_reserved_per_block=1 * KIB,
    registers_per_sm=65536,
    threads_per_sm=1536,
    blocks_per_sm=16,
    sources=_sources(
        "NVIDIA Ampere GA102 GPU architecture whitepaper (2020)",
        fp16_tensor_flops="GA102 whitepaper, dense, fp32 accumulation (half the fp16 rate)",
        l2_bandwidth_bytes_per_s="not published",
    ),
)

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {gpu.name: gpu for gpu in (A100_40GB, A100_80GB, H100_SXM, H200, T4, RTX_3090)}
)


def find_gpu(device_name: str) -> Gpu | None:
    """The entry for a name as the driver reports it ("NVIDIA H200"), or None."""
    words = device_name.upper().replace("NVIDIA", "").replace("TESLA", "").strip()
    if "H200" in words:
        return H200
    if "H100" in words and "PCIE" not in words and "NVL" not in words:
        return H100_SXM
    if "A100" in words:
        return A100_80GB if "80GB" in words else A100_40GB
    if words == "T4":
        return T4
    if "RTX 3090" in words and "TI" not in words.split("RTX 3090")[1]:
        return RTX_3090
    return None
