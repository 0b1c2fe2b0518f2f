"""Passes over memory of element-wise chains, fused and not: K13."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement, exact
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import MEMORY
from repro.claims.values import pick, worst
from repro.claims.works import AUTODIFF, OURS
from repro.experiments.chains.fusion import FULL_BYTES


def passes(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes over the bytes of one pass: a row per chain and implementation."""
    rows = pick(frame, metric="moved_bytes").copy()
    rows["value"] = rows["value"] / FULL_BYTES
    table = rows.pivot_table(index=["chain", "implementation"], columns="source", values="value")
    return table.reindex(columns=["predicted", "measured"]).reset_index()


@claim(
    "K13",
    "unfused scale-and-bias moves twice the fused bytes",
    AUTODIFF,
    "section 3.2",
    experiments=("fusion",),
    shown="fusion_passes",
    overturn=(Scale({"implementation": "unfused"}),),
    compared=False,
)
def k13(frame: pandas.DataFrame) -> Finding:
    table = passes(frame).set_index(["chain", "implementation"])
    one = table.loc["scale-shift"]
    ratio = {s: float(one.loc["unfused", s] / one.loc["fused", s]) for s in table.columns}

    def times(value: float) -> str:
        return f"{value:.2f}x (host backend)" if value == value else NOT_MEASURED

    return Finding(
        predicted=f"{ratio['predicted']:.2f}x",
        measured=times(ratio["measured"]),
        parts=[exact("bytes unfused over fused, counted, over 2", ratio["measured"], 2)],
    )


@claim(
    "fusion of longer chains",
    "bias, GELU, dropout, residual: 9 passes become 3; layer norm: 6 become 2",
    OURS,
    experiments=("fusion",),
    shown="fusion_passes",
    conditions="executed on the host; no counter of a card",
    overturn=(Scale(),),
)
def fusion_of_longer_chains(frame: pandas.DataFrame) -> Finding:
    table = passes(frame).set_index(["chain", "implementation"])
    ours = table.loc[(slice(None), ["unfused", "fused"]), :]
    counts = worst(ours["measured"] / ours["predicted"])
    longest = table.loc["bias-gelu-dropout-residual"]
    gain = {s: float(longest.loc["unfused", s] / longest.loc["fused", s]) for s in table.columns}

    def times(value: float) -> str:
        return f"{value:.2f}x (host backend)" if value == value else NOT_MEASURED

    return Finding(
        predicted=f"{gain['predicted']:.2f}x fewer bytes",
        measured=times(gain["measured"]),
        parts=[exact("bytes counted over passes, worst chain", counts)],
    )


@claim(
    "fusion by torch.compile",
    "the compiler reaches the fused passes by itself",
    OURS,
    experiments=("fusion",),
    shown="fusion_passes",
    conditions="bytes by Inductor's own estimate of the code it makes, not by a counter",
    overturn=(Scale(),),
)
def fusion_by_torch_compile(frame: pandas.DataFrame) -> Finding:
    table = passes(frame).set_index(["chain", "implementation"])
    compiled = table.loc[(slice(None), "torch-compile"), :]
    reach = worst(compiled["measured"] / compiled["predicted"])
    return Finding(
        predicted="2, 3, 2 passes",
        measured=f"at most {reach:.3f} of that (Inductor's count)" if reach == reach else NOT_MEASURED,
        parts=[agreement("the compiler's bytes over the fused passes, worst", reach, 1, MEMORY, Evidence.DERIVED)],
    )
