"""Levels of a GPU's memory: size, bandwidth, latency, and the intensity at which each one binds.

Predicted are datasheets and what follows from units and clocks (``analysis.hardware``, with the
origin of every figure). Measured rows are those of ``gpu-ceilings`` (our probes) and ``ceiling``
(PyTorch's copy and product). A kernel that does fewer FLOPs per byte of a level than the level's
*ridge*, the tensor cores' rate over the level's bandwidth, is bound by that level.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis.hardware import A100_40GB, A100_80GB, GPUS, H100_SXM, H200, Gpu
from repro.experiments import Cell, Experiment, Row, row

CARDS = (A100_40GB, A100_80GB, H100_SXM, H200)
LEVELS = ("registers", "shared memory", "L2", "HBM", "host link")
RATES = ("tensor cores", "exponentials")
REGISTER_BYTES = 4
PCIE_BYTES_PER_S = {"A100": 32e9, "H100": 64e9, "H200": 64e9}
"""One direction of the link to the host: PCIe 4.0 or 5.0, 16 lanes (NVIDIA datasheets)."""
#: Level or rate -> (experiment, implementation), the first on record counts.
MEASURED = {
    "shared memory": (("gpu-ceilings", "shared-memory-read"),),
    "L2": (("gpu-ceilings", "sm-boundary-read"),),
    "HBM": (("gpu-ceilings", "hbm-copy"), ("ceiling", "copy")),
    "host link": (("gpu-ceilings", "host-to-device"),),
    "tensor cores": (("gpu-ceilings", "matmul"), ("ceiling", "matmul-bf16-8192")),
    "exponentials": (("gpu-ceilings", "exp2"),),
}
LATENCY = {"L2": ("gpu-ceilings", "l2-latency"), "HBM": ("gpu-ceilings", "hbm-latency")}


def sizes(gpu: Gpu) -> dict[str, float]:
    """Bytes of each level on the whole card; the host's memory is not the card's to say."""
    return {
        "registers": gpu.sms * gpu.registers_per_sm * REGISTER_BYTES,
        "shared memory": gpu.sms * gpu.shared_bytes_per_sm,
        "L2": gpu.l2_bytes,
        "HBM": gpu.memory_bytes,
    }


def bandwidths(gpu: Gpu) -> dict[str, float]:
    """Bytes per second of each level where a datasheet or a clock says one."""
    link = PCIE_BYTES_PER_S.get(gpu.name.split("-")[0])
    found = {
        "shared memory": gpu.shared_bandwidth_bytes_per_s,
        "L2": gpu.l2_bandwidth_bytes_per_s,
        "HBM": gpu.hbm_bandwidth_bytes_per_s,
        "host link": link,
    }
    return {level: rate for level, rate in found.items() if rate is not None}


def cards() -> list[Cell]:
    """The papers' cards and the one that our records are from."""
    return [Cell(device=gpu.name) for gpu in CARDS]


def predict(one: Cell) -> Iterator[Row]:
    """Sizes, rates and ridges of a card; the levels are the implementations."""
    gpu = GPUS[str(one["device"])]
    known = {"tool": "datasheet, units and clocks"}
    for level, value in sizes(gpu).items():
        yield row("size_bytes", value, implementation=level, **known)
    for level, value in bandwidths(gpu).items():
        yield row("bandwidth", value / 1e12, unit="TB/s", implementation=level, **known)
        yield row("ridge", gpu.fp16_tensor_flops / value, unit="FLOP/B", implementation=level, **known)
    for rate, value, unit in (
        ("tensor cores", gpu.fp16_tensor_flops, "TFLOP/s"),
        ("exponentials", gpu.exp_per_s, "Texp/s"),
    ):
        yield row("throughput", value / 1e12, unit=unit, implementation=rate, **known)


EXPERIMENT = Experiment("memory-hierarchy", predict=predict, also=cards)
