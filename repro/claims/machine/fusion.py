"""Passes over memory of element-wise chains, fused and not: K13."""

from __future__ import annotations

from typing import Any

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement, exact
from repro.claims.register import Finding, claim
from repro.claims.tolerances import MEMORY
from repro.claims.values import NAN, against_sums, over, pick, worst
from repro.claims.works import AUTODIFF, OURS
from repro.experiments.chains.fusion import FULL_BYTES

KEYS = ["chain", "implementation"]
SEEN: dict[str, Any] = {"experiments": ("fusion",), "shown": "fusion_passes"}


def passes(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes over the bytes of one pass: a row per chain and implementation."""
    rows = pick(frame, metric="moved_bytes").copy()
    rows["value"] = rows["value"] / FULL_BYTES
    table = rows.pivot_table(index=KEYS, columns="source", values="value")
    return table.reindex(columns=["predicted", "measured"]).reset_index()


def gain(frame: pandas.DataFrame, chain: str) -> tuple[float, float]:
    """Bytes unfused over fused, predicted and measured."""
    found = over(frame, "unfused", "fused", "source", metric="moved_bytes", chain=chain)
    return float(found.get("predicted", NAN)), float(found.get("measured", NAN))


def over_passes(frame: pandas.DataFrame, names: list[str]) -> float:
    """Bytes of these implementations over their passes, worst chain."""
    return worst(against_sums(pick(frame, metric="moved_bytes", implementation=names), KEYS))


@claim(
    "K13",
    "unfused scale-and-bias moves twice the fused bytes",
    AUTODIFF,
    "section 3.2",
    **SEEN,
    overturn=(Scale({"implementation": "unfused"}),),
    compared=False,
)
def k13(frame: pandas.DataFrame) -> Finding:
    model, counted = gain(frame, "scale-shift")
    return Finding(
        predicted=f"{model:.2f}x",
        measured=f"{counted:.2f}x (host backend)",
        parts=[exact("bytes unfused over fused, counted, over 2", counted, 2)],
    )


@claim(
    "fusion of longer chains",
    "bias, GELU, dropout, residual: 9 passes become 3; layer norm: 6 become 2",
    OURS,
    **SEEN,
    conditions="executed on the host; no counter of a card",
    overturn=(Scale({"implementation": ("unfused", "fused")}),),
)
def fusion_of_longer_chains(frame: pandas.DataFrame) -> Finding:
    model, counted = gain(frame, "bias-gelu-dropout-residual")
    return Finding(
        predicted=f"{model:.2f}x fewer bytes",
        measured=f"{counted:.2f}x (host backend)",
        parts=[exact("bytes counted over passes, worst chain", over_passes(frame, ["unfused", "fused"]))],
    )


@claim(
    "fusion by torch.compile",
    "the compiler reaches the fused passes by itself",
    OURS,
    **SEEN,
    conditions="bytes by Inductor's own estimate of the code it makes, not by a counter",
    overturn=(Scale({"implementation": "torch-compile"}),),
)
def fusion_by_torch_compile(frame: pandas.DataFrame) -> Finding:
    reach = over_passes(frame, ["torch-compile"])
    return Finding(
        predicted="2, 3, 2 passes",
        measured=f"at most {reach:.3f} of that (Inductor's count)",
        parts=[agreement("the compiler's bytes over the fused passes, worst", reach, 1, MEMORY, Evidence.DERIVED)],
    )
