"""What crosses the SM boundary, and what reaches HBM behind L2."""

from __future__ import annotations

from typing import Any

import pandas

from analysis.hardware import H200
from repro.claims.mutations import Mirror, Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import COUNTER
from repro.claims.values import GB as GB
from repro.claims.values import NAN, by, worst
from repro.claims.works import OURS
from repro.experiments.bytes import machine_sectors

SEEN: dict[str, Any] = {"experiments": ("l2-absorption",), "shown": "two_levels"}


def both(frame: pandas.DataFrame, metric: str) -> tuple[str, str, pandas.Series]:
    """What the model and the counter say of the longest sequence, and their ratio by length."""
    model, counter = (by(frame, "seqlen_q", source=s, heads=1, metric=metric) for s in ("predicted", "measured"))
    longest = counter.index.max() if len(counter) else NAN
    told, found = (f"{table.get(longest, NAN) / GB:.2f} GB at N = {longest / 1024:.0f}k" for table in (model, counter))
    return told, f"{found} (H200)", (counter / model).dropna()


@claim(
    "SM boundary",
    "a forward's reads across the SM boundary are Q + (N/128)(K + V), N = 32k to 256k",
    OURS,
    **SEEN,
    conditions="FlashAttention-2 of PyTorch 2.11, bf16, d = 128, one head, H200",
    overturn=(Scale({"metric": "sram_read_bytes"}), Mirror("seqlen_q", {"metric": "sram_read_bytes"})),
)
def sm_boundary(frame: pandas.DataFrame) -> Finding:
    told, found, ratio = both(frame, "sram_read_bytes")
    part = agreement("counter over sum, worst length", worst(ratio), 1, COUNTER, Evidence.HARDWARE)
    return Finding(predicted=told, measured=found, parts=[part])


@claim(
    "HBM behind L2",
    "HBM reads behind L2: K and V once while L2 holds them, then what a simulated L2 misses",
    OURS,
    **SEEN,
    conditions="one kernel, one card: another form of reading would show elsewhere",
    chosen="even hash, copies in both partitions, LRU, equal shares: none published",
    overturn=(Scale({"metric": "hbm_read_bytes"}),),
)
def hbm_behind_l2(frame: pandas.DataFrame) -> Finding:
    told, found, ratio = both(frame, "hbm_read_bytes")
    held = ratio.index * 2 * 128 * 2 <= H200.usable_l2_bytes
    return Finding(
        predicted=told,
        measured=found,
        parts=[
            agreement(f"counter over model {when}", worst(some), 1, COUNTER, Evidence.HARDWARE)
            for when, some in (("while L2 holds K and V", ratio[held]), ("after several waves, worst", ratio[~held]))
        ],
    )


@claim(
    "machine code",
    "bytes between L1 and L2 follow from a kernel's machine code, registers that it spills included",
    OURS,
    experiments=machine_sectors.WITH_COUNTERS,
    shown="machine_sectors",
    conditions="kernels of PyTorch 2.11 executed without a GPU, L1 without a limit; counters of an H200",
    overturn=(Scale({"experiment": machine_sectors.NAME}),),
)
def machine_code(frame: pandas.DataFrame) -> Finding:
    rows = machine_sectors.beside(frame)
    ratio = rows["machine_code"] / rows["counter"]
    kept = (rows["machine_code"] - rows["spilled"]) / rows["formula"]
    writes = rows[(rows["counters"] == machine_sectors.LONG) & (rows["direction"] == "write")]

    def largest(column: str) -> str:
        return f"{writes[column].max() / GB:.1f} GB" if len(writes) else NOT_MEASURED

    return Finding(
        predicted=f"{largest('formula')} without spills",
        measured=f"{largest('machine_code')} by machine code, {largest('counter')} by counter; {ratio.count()} sums",
        parts=[
            agreement("machine code over counter, worst kernel", worst(ratio), 1, COUNTER, Evidence.EXECUTED),
            agreement("without spills over formula, worst kernel", worst(kept), 1, COUNTER, Evidence.EXECUTED),
        ],
    )
