"""What autograd keeps between the passes: K1."""

from __future__ import annotations

import pandas

from repro.claims.mutations import RAN, Scale, every, setting
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import MEMORY
from repro.claims.values import known, worst
from repro.claims.works import RECOMPUTE

#: fp32, one head, as the records are.
ITEM = 4


def noted(row: pandas.Series) -> float:
    """The note's bytes of a row: 4 Nd + 2 N of flash attention, 2 N² beside q, k, v of standard."""
    n, d = row["seqlen_q"], row["head_dim"]
    return ITEM * (4 * n * d + 2 * n if row["implementation"] == "flash" else 3 * n * d + 2 * n**2)


@claim(
    "K1",
    "flash keeps 4 Nd + 2 N elements for the backward, standard 2 N² more",
    RECOMPUTE,
    "section 4.1",
    experiments=("attention-variants",),
    shown="saved_for_backward",
    conditions="PyTorch on a CPU, by its hooks",
    as_claimed=every(*(setting(noted, metric="saved_bytes", implementation=n, **RAN) for n in ("standard", "flash"))),
    overturn=(Scale({"metric": "saved_bytes"}),),
    compared=False,
)
def k1(frame: pandas.DataFrame) -> Finding:
    """Both halves against the note's counts, in bytes seen by autograd's hooks."""
    rows = known(frame, metric="saved_bytes", implementation=["standard", "flash"], source="measured")
    ours = rows["implementation"] == "flash"
    operands = 3 * rows["seqlen_q"] * rows["head_dim"] * ITEM
    flash = (rows["value"] / rows.apply(noted, axis=1))[ours] if len(rows) else rows["value"]
    standard = ((rows["value"] - operands) / (2 * rows["seqlen_q"] ** 2 * ITEM))[~ours]
    return Finding(
        predicted="4 Nd + N; 3 Nd + N²",
        measured=f"{len(rows)} points: standard keeps P and not S, flash one statistic a row"
        if len(rows)
        else NOT_MEASURED,
        parts=[
            agreement(what, worst(ratio), 1, MEMORY, Evidence.OTHER)
            for what, ratio in (
                ("flash: bytes kept over 4 Nd + 2 N, worst", flash),
                ("standard: bytes kept beside q, k, v over 2 N², worst", standard),
            )
        ],
    )
