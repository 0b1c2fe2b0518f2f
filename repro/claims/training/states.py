"""Model states and activations by formula: K12, ZeRO's Table 1, Korthikanti's Table 4."""

from __future__ import annotations

import math

import pandas

from analysis.model_states import model_state_bytes
from analysis.parallel_activations import decoder_model_bytes
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import MEMORY
from repro.claims.works import AUTODIFF, KORTHIKANTI, ZERO

#: LLaMA-7B (Touvron et al. 2023): 6.74e9 parameters, 32 layers, h = 4096, 32 heads, MLP 11008.
LLAMA_PARAMETERS = 6_738_415_616


LLAMA: dict[str, int] = {"hidden": 4096, "heads": 32, "layers": 32, "mlp_hidden": 11008}


def dominating_length(*, attention_matrix: bool) -> int:
    """Smallest multiple of 256 tokens (batch 1) whose activations exceed 16 bytes a parameter."""
    states = model_state_bytes(LLAMA_PARAMETERS).total
    seqlen = 256
    while decoder_model_bytes(batch=1, seqlen=seqlen, attention_matrix=attention_matrix, **LLAMA) <= states:
        seqlen += 256
    return seqlen


def worst(ratio: pandas.Series) -> float:
    """The ratio farthest from 1, NaN if there is none."""
    known = ratio.dropna()
    return float(known.iloc[(known - 1).abs().argmax()]) if len(known) else math.nan


@claim(
    "K12",
    "a 1 x 4096 x 4096 bf16 activation is 32 MiB; at long context activations dominate a 7B model",
    AUTODIFF,
    "section 3.1",
    experiments=("training-memory",),
    shown="training_memory",
    conditions="the 7B model is a formula",
    overturn=(Scale(),),
)
def k12(frame: pandas.DataFrame) -> Finding:
    """One activation's bytes, and the context from which activations dominate a 7B model."""
    import numpy as np

    one = np.empty((1, 4096, 4096), np.uint16).nbytes  # bf16 has no NumPy type of its own
    standard = dominating_length(attention_matrix=True)
    flash = dominating_length(attention_matrix=False)
    rows = frame[
        (frame["implementation"] == "mixed-precision")
        & (frame["metric"] == "saved_bytes")
        & (frame["policy"] == "16-bit")
    ].pivot_table(index="batch", columns="source", values="value")
    known = "measured" in rows and not rows["measured"].isna().any()
    ratio = worst(rows["measured"] / rows["predicted"]) if known else math.nan
    return Finding(
        predicted=f"32 MiB; activations exceed 16 bytes a parameter from N = {standard} with the "
        f"attention matrix, {flash} without (batch 1)",
        measured=f"one layer, formula of its bytes: {ratio - 1:+.2%}" if known else NOT_MEASURED,
        parts=[
            Part(what="MiB of one activation", value=one / 2**20, low=32, high=32, evidence=Evidence.DERIVED),
            agreement("a layer's saved bytes over the formula", ratio, 1, MEMORY, Evidence.OTHER),
            Part(
                what="length from which activations dominate, flash attention",
                value=flash,
                high=32768,
                form=",.0f",
                evidence=Evidence.DERIVED,
            ),
        ],
    )


@claim(
    "ZeRO Table 1",
    "model states by stage and number of ranks, 54 entries",
    ZERO,
    "Table 1",
    experiments=("several-ranks", "zero-table"),
    shown="sharded_states",
    conditions="the table's models are formulas",
    overturn=(Scale(), Scale({"experiment": "zero-table"}, source="published")),
)
def zero_table_1(frame: pandas.DataFrame) -> Finding:
    """All 54 entries, to the unit of their last printed digit."""
    printed = frame[(frame["source"] == "published") & (frame["experiment"] == "zero-table")]
    printed = printed.dropna(subset=["value"])
    wrong, count = 0, len(printed)
    for row in printed.itertuples():
        got = model_state_bytes(row.parameters, int(row.ranks), int(row.stage)).total
        wrong += abs(got - row.value) >= row.last_digit_bytes
    held = frame[
        (frame["part"] == "sharded-states")
        & frame["metric"].isin(["parameter_bytes", "gradient_bytes", "optimizer_bytes"])
    ].pivot_table(index=["implementation", "ranks", "metric"], columns="source", values="value")
    known = "measured" in held and not held["measured"].isna().any()
    ratio = worst(held["measured"] / held["predicted"]) if known else math.nan
    return Finding(
        predicted=f"{count - wrong} of {count} entries to their last digit",
        measured=f"the same formulas on 2 and 4 ranks: {ratio - 1:+.2%}" if known else NOT_MEASURED,
        published=f"{count} entries",
        parts=[
            Part(
                what="entries off by a unit of their last digit",
                value=wrong if count else math.nan,
                high=0,
                low=0,
                form=".0f",
                evidence=Evidence.PUBLISHED,
            ),
            agreement("bytes held over the formulas, worst", ratio, 1, MEMORY, Evidence.OTHER),
        ],
    )


@claim(
    "Korthikanti 4 %",
    "and cost 4 % of time instead of 39 %",
    KORTHIKANTI,
    "Table 4",
    experiments=("korthikanti",),
    shown="parallel_layer",
    conditions="like for like, of what Table 4 prints: 7 % for selective recomputation alone, "
    "where the products say 1.8 %; 4 % is with sequence parallelism, which saves 3 % by itself",
    needs="a machine with eight GPUs joined by NVLink",
)
def korthikanti_4_percent(frame: pandas.DataFrame) -> Finding:
    """Extra FLOPs of selective recomputation against the published overhead of a layer."""
    rows = frame[(frame["source"] == "published") & (frame["metric"] == "time_overhead")]
    printed = rows.groupby("implementation")["value"].max()

    def overhead(name: str) -> float:
        return float(printed[name]) if name in printed.index else math.nan

    seqlen, hidden = 2048, 6144  # the 22B model
    forward = 24 * hidden + 4 * seqlen
    extra = 4 * seqlen / (3 * forward)  # attention's two products again, of forward + 2 backward
    alone, both = overhead("selective"), overhead("selective + sequence parallel")
    full = overhead("full recompute")
    return Finding(
        predicted=f"{extra:.1%} more products (22B), {1 / 3:.0%} for full recomputation",
        published=f"{alone:.0%} alone, {both:.0%} with sequence parallelism, {full:.0%} full",
        parts=[
            Part(
                what="printed overhead less the predicted products, selective",
                value=alone - extra,
                low=-0.03,
                high=0.03,
                evidence=Evidence.PUBLISHED,
            ),
            Part(
                what="printed overhead less the predicted products, full",
                value=full - 1 / 3,
                low=-0.1,
                high=0.1,
                evidence=Evidence.PUBLISHED,
            ),
        ],
    )
