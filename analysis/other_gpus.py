"""GPUs beyond those of the papers, from their makers' documents; none was measured by us."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from analysis.gpu import KIB, MIB, Gpu, sources_of

_ADA = "NVIDIA Ada GPU architecture whitepaper (v2, 2023)"
_HOPPER = "NVIDIA H100 Tensor Core GPU architecture whitepaper (2022)"
_UNPUBLISHED = "not published"

RTX_4090 = Gpu(
    name="GeForce RTX 4090",
    compute_capability=(8, 9),
    sms=128,
    boost_clock_hz=2.520e9,
    memory_bytes=24564 * MIB,
    hbm_bandwidth_bytes_per_s=1.008e12,
    l2_bytes=72 * MIB,
    l2_partitions=1,
    l2_bandwidth_bytes_per_s=None,
    fp16_tensor_flops=165.2e12,
    fp32_flops=82.6e12,
    shared_bytes_per_sm=100 * KIB,
    shared_bytes_per_block=99 * KIB,
    shared_reserved_per_block=1 * KIB,
    registers_per_sm=65536,
    threads_per_sm=1536,
    blocks_per_sm=24,
    sources=sources_of(
        f"{_ADA}, appendix A",
        fp16_tensor_flops=f"{_ADA}, appendix A: dense, fp32 accumulation (half the fp16 rate)",
        l2_bandwidth_bytes_per_s=_UNPUBLISHED,
    ),
)

L40S = replace(
    RTX_4090,
    name="L40S",
    sms=142,
    memory_bytes=46068 * MIB,
    hbm_bandwidth_bytes_per_s=864e9,
    l2_bytes=96 * MIB,
    fp16_tensor_flops=362.05e12,
    fp32_flops=91.6e12,
    tensor_flops_per_clock=1024,
    sources=sources_of(
        f"NVIDIA L40S datasheet (2023); {_ADA} for the chip (AD102)",
        l2_bandwidth_bytes_per_s=_UNPUBLISHED,
        tensor_flops_per_clock="362 TFLOP/s = 142 SMs × 1024 FLOP × 2.49 GHz",
    ),
)

L4 = replace(
    RTX_4090,
    name="L4",
    sms=58,
    boost_clock_hz=2.040e9,
    memory_bytes=23034 * MIB,
    hbm_bandwidth_bytes_per_s=300e9,
    l2_bytes=48 * MIB,
    fp16_tensor_flops=121e12,
    fp32_flops=30.3e12,
    tensor_flops_per_clock=1024,
    sources=sources_of(
        f"NVIDIA L4 datasheet (2023); {_ADA} for the chip (AD104)",
        l2_bandwidth_bytes_per_s=_UNPUBLISHED,
        tensor_flops_per_clock="121 TFLOP/s = 58 SMs × 1024 FLOP × 2.04 GHz",
    ),
)

A10 = replace(
    RTX_4090,
    name="A10",
    compute_capability=(8, 6),
    sms=72,
    boost_clock_hz=1.695e9,
    memory_bytes=23028 * MIB,
    hbm_bandwidth_bytes_per_s=600e9,
    l2_bytes=6 * MIB,
    fp16_tensor_flops=125e12,
    fp32_flops=31.2e12,
    blocks_per_sm=16,
    tensor_flops_per_clock=1024,
    sources=sources_of(
        "NVIDIA A10 datasheet (2021) and GA102 architecture whitepaper (2020)",
        l2_bandwidth_bytes_per_s=_UNPUBLISHED,
        tensor_flops_per_clock="125 TFLOP/s = 72 SMs × 1024 FLOP × 1.695 GHz",
    ),
)

H100_PCIE = Gpu(
    name="H100-PCIe-80GB",
    compute_capability=(9, 0),
    sms=114,
    boost_clock_hz=1.755e9,
    memory_bytes=81559 * MIB,
    hbm_bandwidth_bytes_per_s=2.0e12,
    l2_bytes=50 * MIB,
    l2_partitions=2,
    l2_bandwidth_bytes_per_s=None,
    fp16_tensor_flops=756e12,
    fp32_flops=51.2e12,
    shared_bytes_per_sm=228 * KIB,
    shared_bytes_per_block=227 * KIB,
    shared_reserved_per_block=1 * KIB,
    registers_per_sm=65536,
    threads_per_sm=2048,
    blocks_per_sm=32,
    sources=sources_of(
        f"{_HOPPER} and H100 PCIe datasheet",
        fp16_tensor_flops="H100 PCIe datasheet, dense; reached at 1.62 GHz",
        l2_bandwidth_bytes_per_s=_UNPUBLISHED,
    ),
)

H100_NVL = replace(
    H100_PCIE,
    name="H100-NVL-94GB",
    sms=132,
    boost_clock_hz=1.785e9,
    memory_bytes=95830 * MIB,
    hbm_bandwidth_bytes_per_s=3.9e12,
    fp16_tensor_flops=835e12,
    fp32_flops=60e12,
    sources=sources_of(
        f"NVIDIA H100 NVL datasheet and product brief (2024); {_HOPPER} for the chip",
        fp16_tensor_flops="H100 NVL datasheet: half of 1,671 TFLOP/s with sparsity",
        l2_bandwidth_bytes_per_s=_UNPUBLISHED,
    ),
)

B200 = replace(
    H100_PCIE,
    name="B200",
    compute_capability=(10, 0),
    sms=148,
    boost_clock_hz=1.965e9,
    memory_bytes=183359 * MIB,
    hbm_bandwidth_bytes_per_s=7.7e12,
    l2_bytes=126 * MIB,
    fp16_tensor_flops=2.25e15,
    fp32_flops=75e12,
    sources=sources_of(
        "NVIDIA HGX B200 datasheet (2024), per GPU",
        sms="reported by the driver, as published by users",
        boost_clock_hz="maximum clock reported by the driver, as published by users",
        l2_bytes="reported by the driver, as published by users",
        l2_partitions="two dies, taken as two partitions: not published",
        l2_bandwidth_bytes_per_s=_UNPUBLISHED,
    ),
)

GB10 = replace(
    RTX_4090,
    name="GB10",
    compute_capability=(12, 1),
    sms=48,
    boost_clock_hz=2.418e9,
    memory_bytes=128e9,
    hbm_bandwidth_bytes_per_s=273e9,
    l2_bytes=24 * MIB,
    fp16_tensor_flops=119e12,
    fp32_flops=31e12,
    sources=sources_of(
        "NVIDIA DGX Spark datasheet (2025)",
        sms="6,144 CUDA cores (DGX Spark datasheet), 128 an SM",
        boost_clock_hz="maximum clock reported by the driver, as published by users",
        l2_bytes="reported by the driver, as published by users",
        fp16_tensor_flops="48 SMs × 1024 FLOP × 2.418 GHz (an eighth of the datasheet's 1 PFLOP/s "
        "of sparse FP4 is 125); whether sums in fp32 run at that rate is not published",
        fp32_flops="NVIDIA at Hot Chips 2025",
        hbm_bandwidth_bytes_per_s="DGX Spark datasheet; LPDDR5X shared with the CPU",
        memory_bytes="DGX Spark datasheet; shared with the CPU",
        l2_partitions=_UNPUBLISHED,
        l2_bandwidth_bytes_per_s=_UNPUBLISHED,
    ),
)

MI300X = Gpu(
    name="MI300X",
    compute_capability=None,
    sms=304,
    boost_clock_hz=2.100e9,
    memory_bytes=196608 * MIB,
    hbm_bandwidth_bytes_per_s=5.3e12,
    l2_bytes=256 * MIB,
    l2_partitions=1,
    l2_bandwidth_bytes_per_s=17.2e12,
    fp16_tensor_flops=1307.4e12,
    fp32_flops=163.4e12,
    shared_bytes_per_sm=64 * KIB,
    shared_bytes_per_block=64 * KIB,
    shared_reserved_per_block=0,
    registers_per_sm=131072,
    threads_per_sm=2048,
    blocks_per_sm=32,
    sources=sources_of(
        "AMD Instinct MI300X datasheet and CDNA 3 white paper (2023)",
        l2_bytes="CDNA 3 white paper: the Infinity Cache, which all compute units share; each of "
        "the eight dies has 4 MB of L2 besides",
        l2_bandwidth_bytes_per_s="CDNA 3 white paper: Infinity Cache, peak",
        shared_bytes_per_sm="CDNA 3 white paper: local data share of a compute unit",
        shared_bytes_per_block="CDNA 3 white paper: local data share of a compute unit",
        shared_reserved_per_block="CDNA 3 instruction set: none",
        registers_per_sm="CDNA 3 white paper: 512 KB of vector registers a compute unit",
        threads_per_sm="CDNA 3 white paper: 32 waves of 64 a compute unit",
        blocks_per_sm="taken as 32: as many waves as a compute unit holds",
    ),
)

OTHER_GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "RTX4090": RTX_4090,
        "4090": RTX_4090,
        "L40S": L40S,
        "L4": L4,
        "A10": A10,
        "H100-PCIe": H100_PCIE,
        "H100-NVL": H100_NVL,
        "B200": B200,
        "GB10": GB10,
        "DGX-Spark": GB10,
        "MI300X": MI300X,
    }
)
"""Short name -> card."""
