"""The study notes' table of a GPU's memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas

from analysis.hardware import GPUS, find_gpu
from repro.claims.protocol import Evidence, share_of
from repro.claims.register import NOT_MEASURED as NOT_MEASURED
from repro.claims.register import Finding, claim
from repro.claims.tolerances import HEADLINE
from repro.claims.values import pick
from repro.claims.works import TILING
from repro.experiments.bytes.memory_hierarchy import CARDS, MEASURED

OURS = "H200"
GIB = 2**30
#: The study notes' GPU table (002, 1.1): level -> bytes per SM or card, TB/s; least and most.
NOTES = {
    "registers": ((256 * 1024, 256 * 1024), None),
    "shared memory": ((48 * 1024, 164 * 1024), (20.0, 20.0)),
    "HBM": ((40 * GIB, 80 * GIB), (1.0, 2.0)),
}


def measured(frame: pandas.DataFrame, card: str, level: str) -> tuple[float, str]:
    """Bandwidth or rate (TB/s, TFLOP/s, Texp/s) and how it was measured; NaN and "" without one."""
    for experiment, probe in MEASURED.get(level, ()):
        rows = pick(frame, experiment=experiment, implementation=probe, source="measured")
        rows = of_card(rows[rows["value"].notna()], card)
        if len(rows):
            return float(rows["value"].iloc[-1]), str(rows["tool"].iloc[-1])
    return math.nan, ""


def of_card(rows: pandas.DataFrame, card: str) -> pandas.DataFrame:
    """The rows recorded on this card."""
    known = [device for device in rows["device"].dropna().unique() if named(device) == card]
    return rows[rows["device"].isin(known)]


def named(device: object) -> str:
    """The card of a recorded device, as ``analysis.hardware`` names it; "" for another."""
    gpu = find_gpu(str(device))
    return gpu.name if gpu else ""


def judge() -> Iterator[tuple[str, ...]]:
    """A row per number of the notes: level, claim, and each card's value with yes or no."""
    for level, (range_bytes, range_rate) in NOTES.items():
        at_sm = level != "HBM"
        claim = " to ".join(
            dict.fromkeys(f"{b / 1024:.0f} KiB per SM" if at_sm else f"{b / GIB:.0f} GB" for b in range_bytes)
        )
        cells = []
        for gpu in CARDS:
            per_sm = {"registers": gpu.registers_per_sm * 4.0, "shared memory": float(gpu.shared_bytes_per_sm)}
            held = per_sm.get(level, gpu.memory_bytes)
            shown = f"{held / 1024:.0f} KiB" if at_sm else f"{held / GIB:.0f} GiB"
            cells.append(f"{_inside(held, range_bytes)}: {shown}")
        yield (level, claim, *cells)
        if range_rate is None:
            continue
        claim = " to ".join(dict.fromkeys(f"{rate:g}" for rate in range_rate)) + " TB/s"
        rates = [gpu.shared_bandwidth_bytes_per_s if at_sm else gpu.hbm_bandwidth_bytes_per_s for gpu in CARDS]
        yield (level, claim, *(f"{_inside(r / 1e12, range_rate)}: {r / 1e12:.3g}" for r in rates))


def _inside(amount: float, limits: tuple[float, float]) -> str:
    low, high = limits
    return "yes" if low * (1 - HEADLINE.share) <= amount <= high * (1 + HEADLINE.share) else "no"


@claim(
    "Note hierarchy",
    "SRAM 48 to 164 KB an SM at ~20 TB/s, HBM 40 to 80 GB at 1 to 2 TB/s",
    TILING,
    "section 1.1",
    experiments=("gpu-ceilings", "ceiling"),
    shown="memory_hierarchy",
    conditions="datasheets of four cards; the note names none",
    compared=False,
)
def note_hierarchy(frame: pandas.DataFrame) -> Finding:
    """The notes' table in one row: datasheets decide, the one measured bandwidth stands beside."""
    rows = list(judge())
    right = {gpu.name: sum(r[2 + i].startswith("yes") for r in rows) for i, gpu in enumerate(CARDS)}
    gpu = GPUS[OURS]
    reached, _ = measured(frame, OURS, "HBM")
    good = [name for name, count in right.items() if count == len(rows)]
    return Finding(
        predicted=f"{OURS}: {gpu.shared_bytes_per_sm // 1024} KiB, "
        f"{gpu.shared_bandwidth_bytes_per_s / 1e12:.1f} TB/s; "
        f"{gpu.memory_bytes / GIB:.0f} GiB, "
        f"{gpu.hbm_bandwidth_bytes_per_s / 1e12:.1f} TB/s. All {len(rows)} numbers are right "
        f"for {', '.join(good) or 'no card'}, {right[OURS]} for the {OURS}",
        measured=f"HBM copy {reached:.2f} TB/s ({OURS})",
        published="19 TB/s, 1.5 TB/s (A100)",
        parts=[
            share_of(
                "share of the cards that all of the table describes",
                [gpu.name in good for gpu in CARDS],
                Evidence.DERIVED,
                "an A100 of 40 or 80 GB, and no newer card",
            )
        ],
    )
