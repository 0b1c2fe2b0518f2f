"""Bytes kept and alive, for every way to compute attention."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import MEMORY
from repro.claims.values import pick, worst
from repro.claims.works import OURS
from repro.experiments.bytes.attention_variants import LENGTHS


@claim(
    "variants",
    "bytes kept and at the peak are as listed, for every variant with a formula",
    OURS,
    experiments=("attention-variants",),
    shown="attention_variants",
    conditions="PyTorch on a CPU, by its hooks and allocation trace",
    overturn=(Scale(),),
)
def variants(frame: pandas.DataFrame) -> Finding:
    rows = pick(frame, metric=["saved_bytes", "peak_bytes"])
    table = rows.pivot_table(index=["metric", "implementation", "seqlen_q"], columns="source", values="value")
    far = worst(table["measured"] / table["predicted"]) if "measured" in table else float("nan")
    return Finding(
        predicted="lists of live tensors",
        measured=f"worst {far - 1:+.2%}" if far == far else NOT_MEASURED,
        parts=[agreement("bytes over the list, worst", far, 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "checkpointed attention",
    "a checkpoint around one standard attention lowers what is kept, and not the peak",
    OURS,
    experiments=("attention-variants",),
    shown="attention_variants",
    conditions="PyTorch on a CPU, by its hooks and allocation trace",
    overturn=(
        Scale({"implementation": "standard-checkpointed"}),
        Scale({"implementation": "standard-checkpointed"}, source="predicted"),
    ),
)
def checkpointed_attention(frame: pandas.DataFrame) -> Finding:
    rows = pick(frame, metric=["saved_bytes", "peak_bytes"])

    def of(metric: str, name: str, source: str) -> float:
        some = pick(rows, metric=metric, implementation=name, source=source, seqlen_q=LENGTHS[-1])
        some = some.dropna(subset=["value"])
        return float(some["value"].iloc[0]) if len(some) else float("nan")

    def halves(source: str) -> tuple[float, float]:
        """What a checkpoint leaves of the kept bytes and of the peak."""
        kept, peak = (
            of(metric, "standard-checkpointed", source) / of(metric, "standard", source)
            for metric in ("saved_bytes", "peak_bytes")
        )
        return kept, peak

    def shown(found: tuple[float, float]) -> str:
        kept, peak = found
        return f"kept x {kept:.2f}, peak x {peak:.2f}" if kept == kept else NOT_MEASURED

    kept, peak = halves("measured")
    return Finding(
        predicted=f"{shown(halves('predicted'))}, N = {LENGTHS[-1]}",
        measured=shown((kept, peak)),
        parts=[
            agreement("what is kept over the list", kept, halves("predicted")[0], MEMORY, Evidence.OTHER),
            agreement("peak with a checkpoint over that without", peak, 1, MEMORY, Evidence.OTHER),
        ],
    )
