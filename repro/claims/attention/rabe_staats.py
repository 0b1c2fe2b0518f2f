"""Rabe and Staats 2021: overhead of attention in chunks."""

from __future__ import annotations

import math
from typing import Any

import pandas

from repro.claims.mutations import Mirror, Scale
from repro.claims.protocol import Evidence, agreement, exponent
from repro.claims.register import Finding, claim
from repro.claims.tolerances import HEADLINE
from repro.claims.values import NAN, by, one, over, text
from repro.claims.works import RABE_STAATS
from repro.experiments.papers.rabe_staats import LENGTHS, ROOT

SEEN: dict[str, Any] = {"experiments": ("rabe-staats",), "shown": "rabe-staats"}
#: Length at which Rabe & Staats state their factors.
RABE_LENGTH = 16384


def _finding(frame: pandas.DataFrame, pass_: str, name: str) -> Finding:
    where = {"experiment": "rabe-staats", "metric": "overhead_bytes", "seqlen_q": RABE_LENGTH, "pass_": pass_}
    factor = over(frame, "standard", "chunked", "source", **where)
    told = one(frame, metric="overhead_ratio", pass_=pass_)
    predicted, measured, printed = (float(factor.get(s, NAN)) for s in ("predicted", "measured", "published"))
    return Finding(
        predicted=f"{text(predicted, '.0f')}x: score maps alone, operation by operation",
        measured=f"{measured:.0f}x",
        published=f"{told:g}x; {printed:.0f}x from its tables",
        parts=[agreement(f"factor in {name} over the published one", measured, told, HEADLINE, Evidence.OTHER)],
    )


@claim(
    "Rabe & Staats, inference",
    "attention in chunks has 59x less overhead than standard attention at N = 16384",
    RABE_STAATS,
    "Table 2",
    **SEEN,
    conditions="theirs compiled for a TPU, bf16 inputs; ours eager PyTorch on a CPU, fp32, where no operation is fused",
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
    **SEEN,
    conditions="theirs compiled for a TPU, bf16 inputs; ours eager PyTorch on a CPU, fp32, whose "
    "standard attention keeps every score map of an operation",
    needs="their program under XLA, which decides what standard attention keeps",
)
def training(frame: pandas.DataFrame) -> Finding:
    return _finding(frame, "forward+backward", "training")


@claim(
    "Rabe & Staats, O(√n)",
    "the practical algorithm needs O(√n) memory",
    RABE_STAATS,
    "section 3",
    **SEEN,
    conditions="chunks of √n keys for 1024 queries, eager PyTorch on a CPU; the paper's own tables keep "
    "chunks of 4096 keys",
    partial="the forward alone, n from 1024 to 16384",
    overturn=(Mirror("seqlen_q", {"implementation": ROOT}),),
    compared=False,
)
def root(frame: pandas.DataFrame) -> Finding:
    bytes_ = by(frame, "seqlen_q", source="measured", metric="overhead_bytes", implementation=ROOT)
    first, last = (bytes_.get(n, NAN) for n in (LENGTHS[0], LENGTHS[-1]))
    slope = math.log(last / first) / math.log(LENGTHS[-1] / LENGTHS[0])
    return Finding(
        predicted="0.50: √n summaries of 1024 queries",
        measured=f"{slope:.2f}: " + ", ".join(f"{v / 2**20:.1f} MiB at {n:g}" for n, v in bytes_.items()),
        published="O(√n)",
        parts=[exponent("exponent of the overhead in n", slope, 0.5, Evidence.OTHER)],
    )
