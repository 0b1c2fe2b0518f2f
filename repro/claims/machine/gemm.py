"""A matrix product level by level: bytes and cache misses."""

from __future__ import annotations

import pandas

from analysis.cache_model import closed_form
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, exact, more, share_of
from repro.claims.register import Finding, claim
from repro.claims.tolerances import MEMORY
from repro.claims.values import NAN, against_sums, off, over, pick, worst
from repro.claims.works import OURS, TILING
from repro.experiments.chains.gemm_cache import BLOCK, FIRST, HARDWARE_SIDE
from repro.experiments.chains.gemm_ladder import SIDE


def elements(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Elements moved a multiply-add: a row per source, form, tile and level."""
    rows = pick(frame, experiment="gemm-ladder", metric=["global_bytes", "shared_bytes"]).copy()
    rows["block_m"] = rows["block_m"].fillna(1)
    keys = ["source", "implementation", "block_m", "dtype", "metric"]
    table = rows.groupby(keys, as_index=False)["value"].sum()
    itemsize = table["dtype"].map({"fp16": 2, "fp32": 4})
    table["value"] = table["value"] / itemsize / SIDE**3
    return table


@claim(
    "matrix product levels",
    "a tile of side T divides global reads by T, a thread tile shared reads by its side",
    OURS,
    experiments=("gemm-ladder",),
    shown="gemm_levels",
    overturn=(Scale(),),
)
def matrix_product_levels(frame: pandas.DataFrame) -> Finding:
    table = elements(frame)
    ratio = against_sums(table[table["value"] > 0], ["implementation", "block_m", "metric"])
    return Finding(
        predicted=f"{len(ratio)} counts",
        measured=off(worst(ratio)),
        parts=[exact("elements counted over the formula, worst", worst(ratio))],
    )


@claim(
    "matrix product misses",
    "tiling keeps a product's blocks in cache",
    TILING,
    "section 1.2",
    experiments=("gemm-cache",),
    shown="gemm_levels",
    conditions="misses of another simulator (cachegrind) in small caches; the processor's own counter is asked too",
    overturn=(Scale(),),
)
def matrix_product_misses(frame: pandas.DataFrame) -> Finding:
    rows = pick(frame, metric=["first_level_misses", "last_level_misses"])
    if "tool" in rows:  # the model's own count, where valgrind is missing, measures nothing
        rows = rows[~rows["tool"].astype(str).str.startswith("LRU model")]
    law = against_sums(rows, ["implementation", "side", "metric"])
    near = law.between(MEMORY.least, 1 / MEMORY.least)
    why = "at N = 96 rows of 384 bytes meet in few sets, and the law is of a cache without sets"
    counter = over(frame, "naive", "tiled", "metric", metric="hardware_first_level_misses", source="measured")
    n = 112
    model = closed_form(n, None, FIRST) / closed_form(n, BLOCK, FIRST)
    fewer = over(rows, "naive", "tiled", "side", metric="first_level_misses", source="measured").get(n, NAN)
    seen = [f"{v:.0f}x by the processor's counter, N = {HARDWARE_SIDE}" for v in counter]
    return Finding(
        predicted=f"{model:.0f}x fewer first-level misses at N = {n}",
        measured=f"{fewer:.0f}x fewer at N = {n}, {off(worst(law), '+.1%')}; "
        + (seen or ["this machine hides the processor's counter"])[0],
        parts=[
            share_of("share of counts of misses within a tenth of the LRU law", near, Evidence.OTHER, why),
            more(f"first-level misses naive over tiled, N = {n}", fewer, Evidence.OTHER),
            *(more("first-level misses naive over tiled, processor's counter", v, Evidence.HARDWARE) for v in counter),
        ],
    )
