"""Rabe and Staats 2021: overhead of attention in chunks."""

from __future__ import annotations

import math

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import HEADLINE
from repro.claims.values import pick
from repro.claims.works import RABE_STAATS

#: Length at which Rabe & Staats state their factors.
RABE_LENGTH = 16384


def factors(frame: pandas.DataFrame) -> dict[tuple[str, str], float]:
    """Overhead of standard attention over that in chunks at N = 16384, by source and pass."""
    rows = frame[frame["experiment"] == "rabe-staats"].dropna(subset=["value"])
    at = rows[(rows["metric"] == "overhead_bytes") & (rows["seqlen_q"] == RABE_LENGTH)]
    wide = at.pivot_table(index=["source", "pass"], columns="implementation", values="value")
    if not {"standard", "chunked"} <= set(wide):
        return {}
    found: dict[tuple[str, str], float] = (wide["standard"] / wide["chunked"]).to_dict()
    return found


def _finding(frame: pandas.DataFrame, pass_: str, name: str) -> Finding:
    factor = factors(frame)
    said = pick(frame, metric="overhead_ratio", pass_=pass_)["value"].dropna()
    told = float(said.iloc[0]) if len(said) else math.nan

    def shown(source: str) -> str:
        value = factor.get((source, pass_), math.nan)
        return f"{value:.0f}x" if math.isfinite(value) else NOT_MEASURED

    return Finding(
        predicted=f"{shown('predicted')}: score maps alone, operation by operation",
        measured=shown("measured"),
        published=f"{told:g}x; {shown('published')} from its tables",
        parts=[
            agreement(
                f"factor in {name} over the published one",
                factor.get(("measured", pass_), math.nan),
                told,
                HEADLINE,
                Evidence.OTHER,
                why="no operation is fused here",
                limits=HEADLINE.factor,
            )
        ],
    )


@claim(
    "Rabe & Staats, inference",
    "attention in chunks has 59x less overhead than standard attention at N = 16384",
    RABE_STAATS,
    "Table 2",
    experiments=("rabe-staats",),
    shown="rabe-staats",
    conditions="theirs compiled for a TPU, bf16 inputs; ours eager PyTorch on a CPU, fp32",
    overturn=(
        Scale({"implementation": "chunked", "pass": "forward"}, 2.3),
        Scale({"implementation": "standard", "pass": "forward"}, 2.3),
    ),
    compared=False,
)
def inference(frame: pandas.DataFrame) -> Finding:
    return _finding(frame, "forward", "inference")


@claim(
    "Rabe & Staats, training",
    "and 32x less with its backward",
    RABE_STAATS,
    "Table 3",
    experiments=("rabe-staats",),
    shown="rabe-staats",
    conditions="theirs compiled for a TPU, bf16 inputs; ours eager PyTorch on a CPU, fp32, whose "
    "standard attention keeps every score map of an operation",
    needs="their program under XLA, which decides what standard attention keeps",
)
def training(frame: pandas.DataFrame) -> Finding:
    return _finding(frame, "forward+backward", "training")
