"""Rabe and Staats 2021: overhead of attention in chunks."""

from __future__ import annotations

import math

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.works import RABE_STAATS

#: Length at which Rabe & Staats state their factors.
RABE_LENGTH = 16384


@claim(
    "Rabe & Staats",
    "chunked attention: 59x less overhead in inference and 32x in training at N = 16384",
    RABE_STAATS,
    "Tables 2 and 3",
    experiments=("rabe-staats",),
    shown="rabe-staats",
    conditions="theirs compiled for a TPU, bf16 inputs; ours eager PyTorch on a CPU, fp32",
    overturn=(
        Scale({"implementation": "chunked", "pass": "forward"}),
        Scale({"implementation": "chunked", "pass": "forward+backward"}),
        Scale({"metric": "overhead_ratio", "pass": "forward"}, source="published"),
        Scale({"metric": "overhead_ratio", "pass": "forward+backward"}, source="published"),
    ),
)
def rabe_staats(frame: pandas.DataFrame) -> Finding:
    """Their two overheads at N = 16384, inference and training, over ours."""
    rows = frame[frame["experiment"] == "rabe-staats"].dropna(subset=["value"])
    at = rows[(rows["metric"] == "overhead_bytes") & (rows["seqlen_q"] == RABE_LENGTH)]
    wide = at.pivot_table(index=["source", "pass"], columns="implementation", values="value")
    if {"standard", "chunked"} <= set(wide):
        factor = (wide["standard"] / wide["chunked"]).to_dict()
    else:
        factor = {}
    said = rows[rows["metric"] == "overhead_ratio"].set_index("pass")["value"].to_dict()
    passes = {"forward": "inference", "forward+backward": "training"}

    def shown(source: str, form: str = ".0f") -> str:
        known = {p: factor[source, p] for p in passes if (source, p) in factor}
        return ", ".join(f"{v:{form}}x in {passes[p]}" for p, v in known.items()) or NOT_MEASURED

    return Finding(
        predicted=f"{shown('predicted')}: score maps alone, operation by operation",
        measured=shown("measured"),
        published=f"{shown('published')} from its tables; "
        + ", ".join(f"{v:g}x" for v in said.values()),
        parts=[
            agreement(
                f"factor in {text} over the published one",
                factor.get(("measured", pass_), math.nan),
                said.get(pass_, math.nan),
                0.25,
                Evidence.OTHER,
                limits=2,
                why="no operation is fused here",
            )
            for pass_, text in passes.items()
        ],
    )
