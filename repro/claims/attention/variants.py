"""Bytes kept and alive, for every way to compute attention."""

from __future__ import annotations

import math
from typing import Any

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, agreement, exponent
from repro.claims.register import Finding, claim
from repro.claims.tolerances import ERROR, MEMORY
from repro.claims.values import NAN, against_sums, by, off, over, pick, worst
from repro.claims.works import FA1, OURS
from repro.experiments.bytes.attention_variants import HEAD_DIM, LENGTHS, LONGEST_EMULATED

METRICS = ["saved_bytes", "peak_bytes"]
SEEN: dict[str, Any] = {
    "experiments": ("attention-variants",),
    "shown": "attention_variants",
    "conditions": "PyTorch on a CPU, by its hooks and allocation trace",
}


@claim(
    "variants",
    "bytes kept and at the peak are as listed, for every variant with a formula",
    OURS,
    **SEEN,
    overturn=(Scale({"metric": ("saved_bytes", "peak_bytes")}),),
)
def variants(frame: pandas.DataFrame) -> Finding:
    far = worst(against_sums(pick(frame, metric=METRICS), ["metric", "implementation", "seqlen_q"]))
    return Finding(
        predicted="lists of live tensors",
        measured=off(far),
        parts=[agreement("bytes over the list, worst", far, 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "checkpointed attention",
    "a checkpoint around one standard attention lowers what is kept, and not the peak",
    OURS,
    **SEEN,
    overturn=(
        Scale({"implementation": "standard-checkpointed"}),
        Scale({"implementation": "standard-checkpointed"}, source="predicted"),
    ),
)
def checkpointed_attention(frame: pandas.DataFrame) -> Finding:
    left = {
        (source, metric): float(
            over(
                frame,
                "standard-checkpointed",
                "standard",
                "seqlen_q",
                source=source,
                metric=metric,
                seqlen_q=LENGTHS[-1],
            ).sum(min_count=1)
        )
        for source in ("predicted", "measured")
        for metric in METRICS
    }
    model, kept, peak = (left[key] for key in (("predicted", METRICS[0]), *(("measured", m) for m in METRICS)))
    return Finding(
        predicted=f"kept x {model:.2f}, peak x {left['predicted', METRICS[1]]:.2f}, N = {LENGTHS[-1]}",
        measured=f"kept x {kept:.2f}, peak x {peak:.2f}",
        parts=[
            agreement("what is kept over the list", kept, model, MEMORY, Evidence.OTHER),
            agreement("peak with a checkpoint over that without", peak, 1, MEMORY, Evidence.OTHER),
        ],
    )


@claim(
    "FA-1 Theorem 1",
    "exact attention in O(N² d) operations with O(N) memory beyond inputs and output",
    FA1,
    "section 3.1",
    experiments=("attention-variants", "accuracy"),
    shown="attention_variants",
    conditions="our kernels with queries outside, as autograd's hooks see them on a CPU; errors "
    "against float64, executed on the host",
    partial="memory and exactness; operations are not counted, N up to 1024",
    overturn=(
        Scale({"implementation": "flash", "metric": "saved_bytes", "seqlen_q": 1024}, 1.2),
        Scale({"implementation": "flash", "metric": "rmse"}, 1.8, only="up"),
    ),
    compared=False,
)
def fa_1_theorem_1(frame: pandas.DataFrame) -> Finding:
    """What is kept beside q, k, v and out over N, and the error beside eager attention's."""
    kept = by(frame, "seqlen_q", source="measured", metric="saved_bytes", implementation="flash")
    beside = kept - 4 * kept.index * HEAD_DIM * 4
    first, last = (beside.get(n, NAN) for n in (LENGTHS[0], LONGEST_EMULATED))
    slope = math.log(last / first) / math.log(LONGEST_EMULATED / LENGTHS[0]) if first > 0 < last else NAN
    errors = over(frame, "flash", "standard", ["dtype", "inputs"], metric="rmse", source="measured", tensor="out")
    most, twice = float(errors.max()), 1 + ERROR.share
    return Finding(
        predicted="one fp32 number a row",
        measured=f"exponent {slope:.2f}: {first:,.0f} B at N = {LENGTHS[0]}, {last:,.0f} B at {LONGEST_EMULATED}; "
        f"error {most:.2f} times that of eager attention at most",
        published="O(N)",
        parts=[
            exponent("exponent in N of the bytes kept beside q, k, v and out", slope, 1, Evidence.OTHER),
            Part(
                "RMSE of out over eager attention's, worst", most, Evidence.COUNTED, high=twice, form=".2f", kind=ERROR
            ),
        ],
    )
