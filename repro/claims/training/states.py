"""Model states and activations by formula: K12, ZeRO's Table 1, Korthikanti's Table 4."""

from __future__ import annotations

import numpy as np
import pandas

from analysis.model_states import model_state_bytes
from analysis.parallel_activations import decoder_model_bytes
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, agreement
from repro.claims.register import Finding, claim
from repro.claims.tolerances import COUNT, MEMORY, PRINTED
from repro.claims.training.sharded_states import HELD, KEYS
from repro.claims.values import NAN, against_sums, formula, known, off, pick, worst
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


@claim(
    "K12",
    "a 1 x 4096 x 4096 bf16 activation is 32 MiB; at long context activations dominate a 7B model",
    AUTODIFF,
    "section 3.1",
    experiments=("training-memory",),
    shown="training_memory",
    conditions="the 7B model is a formula; 32k tokens are taken for a long context",
    overturn=(Scale({"implementation": "mixed-precision", "policy": "16-bit"}),),
)
def k12(frame: pandas.DataFrame) -> Finding:
    """One activation's bytes, and the context from which activations dominate a 7B model."""
    one = formula(float(np.empty((1, 4096, 4096), np.uint16).nbytes))  # bf16 has no NumPy type of its own
    standard, flash = (dominating_length(attention_matrix=matrix) for matrix in (True, False))
    rows = pick(frame, implementation="mixed-precision", metric="saved_bytes", policy="16-bit")
    ratio = worst(against_sums(rows, ["batch"]))
    return Finding(
        predicted=f"32 MiB; activations exceed 16 bytes a parameter from N = {standard} with the "
        f"attention matrix, {flash} without (batch 1)",
        measured=f"one layer, formula of its bytes: {off(ratio)}",
        parts=[
            Part("MiB of one activation", one / 2**20, Evidence.DERIVED, low=32, high=32, kind=COUNT),
            agreement("a layer's saved bytes over the formula", ratio, 1, MEMORY, Evidence.OTHER),
            Part(
                "length from which activations dominate, flash attention",
                flash,
                Evidence.DERIVED,
                high=32768,
                form=",.0f",
                why="a long context",
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
    overturn=(
        Scale({"part": "sharded-states", "metric": tuple(HELD)}),
        Scale({"experiment": "zero-table"}, source="published"),
    ),
)
def zero_table_1(frame: pandas.DataFrame) -> Finding:
    """All 54 entries, to the unit of their last printed digit."""
    printed = known(frame, source="published", experiment="zero-table")
    states = [model_state_bytes(row.parameters, int(row.ranks), int(row.stage)).total for row in printed.itertuples()]
    off_by = (formula(pandas.Series(states, index=printed.index, dtype=float)) - printed["value"]).abs()
    wrong = int((off_by >= printed.get("last_digit_bytes", NAN)).sum())
    held = worst(against_sums(pick(frame, part="sharded-states", metric=HELD), KEYS))
    count, what = len(printed), "entries off by a unit of their last digit"
    return Finding(
        predicted=f"{count - wrong} of {count} entries to their last digit",
        measured=f"the same formulas on 2 and 4 ranks: {off(held)}",
        published=f"{count} entries",
        parts=[
            Part(what, wrong if count else NAN, Evidence.PUBLISHED, low=0, high=0, form=".0f", kind=COUNT),
            agreement("bytes held over the formulas, worst", held, 1, MEMORY, Evidence.OTHER),
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
    printed = known(frame, source="published", metric="time_overhead").groupby("implementation")["value"].max()
    names = ("selective", "selective + sequence parallel", "full recompute")
    alone, both, full = (float(printed.get(name, NAN)) for name in names)
    seqlen, hidden = 2048, 6144  # the 22B model
    # Attention's two products again, of a forward and two for the backward.
    extra = 4 * seqlen / (3 * (24 * hidden + 4 * seqlen))
    return Finding(
        predicted=f"{extra:.1%} more products (22B), {1 / 3:.0%} for full recomputation",
        published=f"{alone:.0%} alone, {both:.0%} with sequence parallelism, {full:.0%} full",
        parts=[
            agreement(f"time with {name} over that of its products", 1 + told, 1 + model, PRINTED, Evidence.PUBLISHED)
            for name, told, model in (("selective", alone, extra), ("full recomputation", full, 1 / 3))
        ],
    )
