"""What autograd keeps between the passes: K1."""

from __future__ import annotations

import pandas

from repro.claims.mutations import RAN, Scale, every, setting
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import MEMORY
from repro.claims.values import pick, worst
from repro.claims.works import RECOMPUTE


@claim(
    "K1",
    "flash keeps 4 Nd + 2 N elements for the backward, standard 2 N² more",
    RECOMPUTE,
    "section 4.1",
    experiments=("attention-variants",),
    shown="saved_for_backward",
    conditions="PyTorch on a CPU, by its hooks",
    as_claimed=every(
        setting(
            lambda row: (3 * row["seqlen_q"] * row["head_dim"] + 2 * row["seqlen_q"] ** 2) * 4,
            metric="saved_bytes",
            implementation="standard",
            **RAN,
        ),
        setting(
            lambda row: (4 * row["seqlen_q"] * row["head_dim"] + 2 * row["seqlen_q"]) * 4,
            metric="saved_bytes",
            implementation="flash",
            **RAN,
        ),
    ),
    overturn=(Scale({"metric": "saved_bytes"}),),
    compared=False,
)
def k1(frame: pandas.DataFrame) -> Finding:
    """K1: both halves against the notes' counts, in bytes seen by autograd's hooks."""
    rows = pick(frame, metric="saved_bytes", implementation=["standard", "flash"], source="measured")
    rows = rows.dropna(subset=["value"])
    found: dict[str, list[float]] = {"standard": [], "flash": []}
    for row in rows.itertuples():
        n, d, item = row.seqlen_q, row.head_dim, 4  # fp32, one head
        operands, matrix = 4 * n * d * item, 2 * n * n * item
        if row.implementation == "flash":
            found["flash"].append(row.value / (operands + 2 * n * item))
        else:
            found["standard"].append((row.value - 3 * n * d * item) / matrix)
    return Finding(
        predicted="4 Nd + N; 3 Nd + N²",
        measured=f"{len(rows)} points: standard keeps P and not S, flash one statistic a row"
        if len(rows)
        else NOT_MEASURED,
        parts=[
            agreement(
                "flash: bytes kept over 4 Nd + 2 N, worst",
                worst(pandas.Series(found["flash"], dtype=float)),
                1,
                MEMORY,
                Evidence.OTHER,
            ),
            agreement(
                "standard: bytes kept beside q, k, v over 2 N², worst",
                worst(pandas.Series(found["standard"], dtype=float)),
                1,
                MEMORY,
                Evidence.OTHER,
            ),
        ],
    )
