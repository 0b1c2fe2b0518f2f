"""What crosses the SM boundary, and what reaches HBM behind L2."""

from __future__ import annotations

import pandas

from analysis.hardware import H200
from repro.claims.mutations import Mirror, Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import COUNTER
from repro.claims.values import pick, worst
from repro.claims.works import OURS
from repro.experiments.bytes import machine_sectors

GB = 1e9


@claim(
    "SM boundary",
    "a forward's reads across the SM boundary are Q + (N/128)(K + V), N = 32k to 256k",
    OURS,
    experiments=("l2-absorption",),
    shown="two_levels",
    conditions="FlashAttention-2 of PyTorch 2.11, bf16, d = 128, one head, H200",
    overturn=(Scale(), Mirror("seqlen_q")),
)
def sm_boundary(frame: pandas.DataFrame) -> Finding:
    tables = {}
    for source in ("predicted", "measured"):
        rows = pick(frame, source=source, heads=1).dropna(subset=["value"])
        wide = rows.pivot_table(index="seqlen_q", columns="metric", values="value")
        tables[source] = wide.reindex(columns=["sram_read_bytes", "hbm_read_bytes"])
    measured = tables["measured"]
    model = tables["predicted"].reindex(measured.index)
    ratio = measured / model
    sm = ratio["sram_read_bytes"]

    def longest(table: pandas.DataFrame, metric: str) -> str:
        known = table[metric].dropna()
        if known.empty:
            return NOT_MEASURED
        return f"{known.iloc[-1] / GB:.2f} GB at N = {known.index[-1] / 1024:.0f}k"

    return Finding(
        predicted=longest(model, "sram_read_bytes"),
        measured=longest(measured, "sram_read_bytes") + " (H200)",
        parts=[agreement("counter over sum, worst length", worst(sm), 1, COUNTER, Evidence.HARDWARE)],
    )


@claim(
    "HBM behind L2",
    "HBM reads behind L2: K and V once while L2 holds them, then what a simulated L2 misses",
    OURS,
    experiments=("l2-absorption",),
    shown="two_levels",
    conditions="one kernel, one card: another form of reading would show elsewhere",
    chosen="even hash, copies in both partitions, LRU, equal shares: none published",
    overturn=(Scale(),),
)
def hbm_behind_l2(frame: pandas.DataFrame) -> Finding:
    tables = {}
    for source in ("predicted", "measured"):
        rows = pick(frame, source=source, heads=1).dropna(subset=["value"])
        wide = rows.pivot_table(index="seqlen_q", columns="metric", values="value")
        tables[source] = wide.reindex(columns=["sram_read_bytes", "hbm_read_bytes"])
    measured = tables["measured"]
    model = tables["predicted"].reindex(measured.index)
    ratio = measured / model
    hbm = ratio["hbm_read_bytes"]
    held = hbm.index * 2 * 128 * 2 <= H200.usable_l2_bytes

    def longest(table: pandas.DataFrame, metric: str) -> str:
        known = table[metric].dropna()
        if known.empty:
            return NOT_MEASURED
        return f"{known.iloc[-1] / GB:.2f} GB at N = {known.index[-1] / 1024:.0f}k"

    return Finding(
        predicted=longest(model, "hbm_read_bytes"),
        measured=longest(measured, "hbm_read_bytes") + " (H200)",
        parts=[
            agreement("counter over model while L2 holds K and V", worst(hbm[held]), 1, COUNTER, Evidence.HARDWARE),
            agreement(
                "counter over model after several waves, worst",
                worst(hbm[~held]),
                1,
                COUNTER,
                Evidence.HARDWARE,
                limits=1.10,
                why="no published pace of thread blocks: analysis/l2",
            ),
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
        measured=f"{largest('machine_code')} by machine code, {largest('counter')} by counter",
        parts=[
            agreement("machine code over counter, worst kernel", worst(ratio), 1, COUNTER, Evidence.EXECUTED),
            agreement("without spills over formula, worst kernel", worst(kept), 1, COUNTER, Evidence.EXECUTED),
        ],
    )
