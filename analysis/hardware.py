"""The GPUs of the papers and of our measurements, with the origin of every figure; others are in
``analysis.other_gpus``.

A measured ceiling, where there is one, replaces these figures in a time prediction; see
``analysis.time_model``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from analysis.gpu import (
    EXP_PER_CLOCK_PER_SM,
    KIB,
    MIB,
    SHARED_BYTES_PER_CLOCK_PER_SM,
    TENSOR_FLOPS_PER_CLOCK_PER_SM,
    Gpu,
    sources_of,
)
from analysis.other_gpus import OTHER_GPUS

__all__ = [
    "A100_40GB",
    "A100_64GB",
    "A100_80GB",
    "A100_PCIE_80GB",
    "EXP_PER_CLOCK_PER_SM",
    "GPUS",
    "H100_SXM",
    "H200",
    "KIB",
    "MIB",
    "RTX_3090",
    "SHARED_BYTES_PER_CLOCK_PER_SM",
    "SHORT_NAMES",
    "T4",
    "TENSOR_FLOPS_PER_CLOCK_PER_SM",
    "Gpu",
    "find_gpu",
    "gpu_named",
]

_A100 = "NVIDIA A100 Tensor Core GPU architecture whitepaper (2020) and A100 datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU architecture whitepaper (2022) and H100 SXM datasheet"

A100_40GB = Gpu(
    name="A100-SXM4-40GB",
    compute_capability=(8, 0),
    sms=108,
    boost_clock_hz=1.410e9,
    memory_bytes=40960 * MIB,
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
    sources=sources_of(_A100),
)

A100_80GB = Gpu(
    name="A100-SXM4-80GB",
    compute_capability=(8, 0),
    sms=108,
    boost_clock_hz=1.410e9,
    memory_bytes=81920 * MIB,
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
    sources=sources_of(_A100),
)

H100_SXM = Gpu(
    name="H100-SXM5-80GB",
    compute_capability=(9, 0),
    sms=132,
    boost_clock_hz=1.830e9,
    memory_bytes=81559 * MIB,
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
    sources=sources_of(
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
    boost_clock_hz=1.830e9,
    memory_bytes=143771 * MIB,
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
    sources=sources_of(
        "NVIDIA H200 Tensor Core GPU datasheet (2024)",
        sms="reported by the device",
        boost_clock_hz="the clock behind 989.4 TFLOP/s, as for the H100, so that all rates are of "
        "one clock; the device reports 1.98 GHz at most, and under a matrix load its power limit "
        "holds it near 1.7 GHz",
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
    memory_bytes=15360 * MIB,
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
    sources=sources_of(
        "NVIDIA T4 datasheet and Turing architecture whitepaper (2018)",
        l2_bandwidth_bytes_per_s="not published",
    ),
)

A100_PCIE_80GB = replace(
    A100_80GB,
    name="A100-PCIe-80GB",
    hbm_bandwidth_bytes_per_s=1.935e12,
    sources=sources_of("NVIDIA A100 80GB PCIe product brief and A100 datasheet (2021)"),
)

A100_64GB = replace(
    A100_80GB,
    name="A100-SXM-64GB",
    sms=124,
    memory_bytes=65536 * MIB,
    hbm_bandwidth_bytes_per_s=1.640e12,
    l2_bytes=32 * MIB,
    l2_bandwidth_bytes_per_s=None,
    fp16_tensor_flops=358e12,
    fp32_flops=22.4e12,
    sources=sources_of(
        "Leonardo, a pan-European pre-exascale supercomputer (Turisini et al. 2023), table of the "
        "custom A100",
        boost_clock_hz="as other A100s: 22.4 TFLOP/s = 124 SMs × 128 FLOP × 1.41 GHz",
        l2_bandwidth_bytes_per_s="not published",
        l2_partitions=_A100,
    ),
)

RTX_3090 = Gpu(
    name="GeForce RTX 3090",
    compute_capability=(8, 6),
    sms=82,
    boost_clock_hz=1.695e9,
    memory_bytes=24576 * MIB,
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
    sources=sources_of(
        "NVIDIA Ampere GA102 GPU architecture whitepaper (2020)",
        fp16_tensor_flops="GA102 whitepaper, dense, fp32 accumulation (half the fp16 rate)",
        l2_bandwidth_bytes_per_s="not published",
    ),
)

_OF_PAPERS = (
    A100_40GB, A100_80GB, A100_PCIE_80GB, A100_64GB, H100_SXM, H200, T4, RTX_3090,
)  # fmt: skip

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {gpu.name: gpu for gpu in (*_OF_PAPERS, *OTHER_GPUS.values())}
)

SHORT_NAMES: Mapping[str, Gpu] = MappingProxyType(
    {"A100": A100_40GB, "H100": H100_SXM, "RTX3090": RTX_3090, "3090": RTX_3090}
    | {short: gpu for short, gpu in OTHER_GPUS.items() if short not in GPUS}
)
"""Other names of cards, for people who type them."""

#: Words of a driver's name that tell nothing: makers, series, and sizes that a card has anyway.
_SILENT = frozenset(
    [
        "NVIDIA",
        "TESLA",
        "GEFORCE",
        "RTX",
        "AMD",
        "INSTINCT",
        "GRAPHICS",
        "DEVICE",
        "SXM",
        "SXM4",
        "SXM5",
        "HBM3",
        "HBM3E",
    ]
)
#: The words that are left -> the card. Others (a Ti, a laptop) are not known.
_WORDS: Mapping[frozenset[str], Gpu] = MappingProxyType(
    {
        frozenset(words.split()): gpu
        for gpu, names in (
            (H200, ("H200", "H200 141GB")),
            (H100_SXM, ("H100", "H100 80GB")),
            (OTHER_GPUS["H100-PCIe"], ("H100 PCIE", "H100 PCIE 80GB")),
            (OTHER_GPUS["H100-NVL"], ("H100 NVL", "H100 NVL 94GB")),
            (A100_80GB, ("A100 80GB",)),
            (A100_PCIE_80GB, ("A100 PCIE 80GB",)),
            (A100_64GB, ("A100 64GB",)),
            (A100_40GB, ("A100", "A100 40GB", "A100 PCIE 40GB")),
            (T4, ("T4",)),
            (RTX_3090, ("3090",)),
            (OTHER_GPUS["4090"], ("4090",)),
            (OTHER_GPUS["L40S"], ("L40S",)),
            (OTHER_GPUS["L4"], ("L4",)),
            (OTHER_GPUS["A10"], ("A10",)),
            (OTHER_GPUS["B200"], ("B200",)),
            (OTHER_GPUS["GB10"], ("GB10",)),
            (OTHER_GPUS["MI300X"], ("MI300X", "MI300X OAM")),
        )
        for words in names
    }
)


def find_gpu(device_name: str) -> Gpu | None:
    """The entry for a name as the driver reports it ("NVIDIA H200"), or None for other cards.

    Whole words are compared: a GH200 is no H200, an A10G no A10.
    """
    words = {word for word in re.split(r"[^A-Z0-9]+", device_name.upper()) if word}
    return _WORDS.get(frozenset(words - _SILENT))


def gpu_named(name: str) -> Gpu:
    """The entry for a name of ``GPUS`` or ``SHORT_NAMES``, in any case, or a driver's name.

    Raises ValueError that lists the names.
    """
    wanted = name.strip().casefold()
    for table in (GPUS, SHORT_NAMES):
        for known, gpu in table.items():
            if known.casefold() == wanted:
                return gpu
    found = find_gpu(name)
    if found is None:
        raise ValueError(f"no GPU {name!r}; known are {', '.join(GPUS)}")
    return found
