"""Rooflines on the cards that the papers and our records are from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from analysis.hardware import A100_40GB, GPUS, H200, Gpu, find_gpu
from analysis.time_model import Ceilings, Work, datasheet_ceilings, predict_time
from repro.experiments import Row, row
from repro.experiments.bytes.memory_hierarchy import MEASURED
from repro.measuring.records import load

#: The card as a record names it -> the card.
CARDS = {f"NVIDIA {gpu.name}": gpu for gpu in (A100_40GB, H200)}
LEVELS = ("tensor cores", "exponentials", "L2", "HBM")


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


def time_row(works: Mapping[str, Work], gpu: Gpu, **more: Any) -> Row:
    """The predicted time of kernels on a card, with the ceiling that sets most of it."""
    ceilings = ceilings_of(gpu.name)
    time = predict_time(works, ceilings)
    tool, note = f"roofline, {ceilings.origin}", f"bound by {time.binding}"
    return row("time_ms", time.seconds * 1e3, tool=tool, note=note, **more)
