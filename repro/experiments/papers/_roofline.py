"""Ceilings of the cards that the papers and our records are from."""

from __future__ import annotations

from functools import cache

from analysis.hardware import A100_40GB, GPUS, H200, find_gpu
from analysis.time_model import Ceilings, datasheet_ceilings
from repro.experiments.bytes.memory_hierarchy import MEASURED
from repro.measuring.records import load

LEVELS = ("tensor cores", "exponentials", "L2", "HBM")


def a100() -> Ceilings:
    """The paper's card, from its datasheet: nothing could be measured on it."""
    return ceilings_of(A100_40GB.name)


def h200() -> Ceilings:
    """The H200 of our records."""
    return ceilings_of(H200.name)


@cache
def ceilings_of(card: str) -> Ceilings:
    """Each ceiling as a committed record of this card has it, else as its datasheet prints it.

    card: a name of ``analysis.hardware.GPUS``.
    """
    gpu = GPUS[card]
    rates = {
        (r.experiment, r.implementation): r.value * 1e12
        for r in load(["gpu-ceilings", "ceiling"], local=False)
        if r.source == "measured" and r.value is not None and find_gpu(str(r.device)) == gpu
    }
    found: dict[str, float] = {}
    for level in LEVELS:
        known = [rates[probe] for probe in MEASURED[level] if probe in rates]
        if known:
            found[level] = known[0]
    sheet = datasheet_ceilings(gpu)
    if not found:
        return sheet
    rest = [level for level in LEVELS if level not in found]
    return Ceilings(
        tensor_flops=found.get("tensor cores", sheet.tensor_flops),
        exp_per_s=found.get("exponentials", sheet.exp_per_s),
        sm_boundary_bytes_per_s=found.get("L2", sheet.sm_boundary_bytes_per_s),
        hbm_bytes_per_s=found.get("HBM", sheet.hbm_bytes_per_s),
        origin=f"measured: {', '.join(found)}" + (f"; datasheet: {', '.join(rest)}" if rest else ""),
    )
