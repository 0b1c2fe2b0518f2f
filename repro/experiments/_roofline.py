"""Ceilings of the cards that the papers and our records are from."""

from __future__ import annotations

from functools import cache

from analysis.hardware import A100_40GB, H200
from analysis.time_model import Ceilings, datasheet_ceilings
from repro.records import load


@cache
def a100() -> Ceilings:
    """The paper's card, from its datasheet: nothing could be measured on it."""
    return datasheet_ceilings(A100_40GB)


@cache
def h200() -> Ceilings:
    """The H200 of our records: matrix products and copies as measured, the rest as printed."""
    rates = {
        r.implementation: r.value for r in load(["ceiling"]) if r.extra["machine"] == "nvidia-h200"
    }
    sheet = datasheet_ceilings(H200)
    tensor, copy = rates.get("matmul-bf16-8192"), rates.get("copy")
    return Ceilings(
        tensor_flops=tensor * 1e12 if tensor else sheet.tensor_flops,
        exp_per_s=sheet.exp_per_s,
        sm_boundary_bytes_per_s=sheet.sm_boundary_bytes_per_s,
        hbm_bytes_per_s=copy * 1e12 if copy else sheet.hbm_bytes_per_s,
        origin="measured: matrix product, copy; datasheet: exponentials, L2" if tensor and copy
        else sheet.origin,
    )  # fmt: skip
