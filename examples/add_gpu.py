"""A new GPU: a ``Gpu`` with the origin of every figure, and every prediction works for it.

Here the A100 as a PCIe card. On the command line: ``--gpu add_gpu:A100_PCIE`` in this folder, or a
TOML file with ``base = "A100-SXM4-80GB"`` and the fields that differ. In the package it would go
into ``analysis/gpus.toml``, as such a table.
"""

from __future__ import annotations

from dataclasses import replace

from analysis.hardware import A100_80GB, Gpu
from analysis.shapes import AttentionShape
from repro.prediction import predict

SHEET = "NVIDIA A100 80GB PCIe product brief (2022)"

A100_PCIE: Gpu = replace(
    A100_80GB,
    name="A100-PCIe-80GB",
    hbm_bandwidth_bytes_per_s=1.935e12,
    sources={**A100_80GB.sources, "hbm_bandwidth_bytes_per_s": SHEET},
)


def main() -> None:
    """One pass on both cards: the kernels that dispatch picks there."""
    shape = AttentionShape(1, 16, 8192, 8192, 128, dtype="bf16")
    for gpu in (A100_80GB, A100_PCIE):
        for algorithm in ("auto", "standard"):
            found = predict(algorithm, shape, "forward", gpu)
            print(
                f"{gpu.name:16} {found.algorithm:9} tile {found.tile.block_m} x "
                f"{found.tile.block_n}: at least {found.time.seconds * 1e3:.2f} ms, "
                f"{found.why()}"
            )


if __name__ == "__main__":
    main()
