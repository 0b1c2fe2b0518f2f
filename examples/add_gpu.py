"""A new GPU: a ``Gpu`` with the origin of every figure, and every prediction works for it.

Here the PCIe card of the H100. In the package it would go into ``analysis/hardware.py``, into
``GPUS`` and ``find_gpu``.
"""

from __future__ import annotations

from dataclasses import replace

from analysis.hardware import H100_SXM, Gpu
from analysis.shapes import AttentionShape
from repro.prediction import predict

SHEET = "NVIDIA H100 PCIe GPU datasheet (2022), dense rates"

H100_PCIE: Gpu = replace(
    H100_SXM,
    name="H100-PCIe-80GB",
    sms=114,
    boost_clock_hz=1.755e9,
    hbm_bandwidth_bytes_per_s=2.0e12,
    l2_bandwidth_bytes_per_s=None,  # not published: left out of the maximum
    fp16_tensor_flops=756e12,
    fp32_flops=51.2e12,
    sources={
        **H100_SXM.sources,
        "sms": SHEET,
        "boost_clock_hz": SHEET,
        "hbm_bandwidth_bytes_per_s": SHEET,
        "fp16_tensor_flops": SHEET,
        "fp32_flops": SHEET,
        "l2_bandwidth_bytes_per_s": "not published",
    },
)


def main() -> None:
    """One pass on both cards."""
    shape = AttentionShape(1, 16, 8192, 8192, 128, dtype="bf16")
    for gpu in (H100_SXM, H100_PCIE):
        found = predict("flash", shape, "forward", gpu)
        print(
            f"{gpu.name:16} tile {found.tile.block_m} x {found.tile.block_n}: at least "
            f"{found.time.seconds * 1e3:.2f} ms, bound by {found.time.binding}"
        )


if __name__ == "__main__":
    main()
