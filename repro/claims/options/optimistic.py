"""The optimistic softmax over the drift of the scores."""

from __future__ import annotations

import math

import pandas

from analysis.optimistic import onset
from repro.claims.mutations import RAN, Scale, setting
from repro.claims.protocol import Evidence, Part
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import STATED
from repro.claims.values import known, pick
from repro.claims.works import OURS
from repro.experiments.bytes.optimistic import EXACT, OPTIMISTIC, SEQLEN_K, cells, first_key_looked_at

#: "No more": and a tenth within limits, as beyond any end that a source states.
LIMITS = (-math.inf, STATED.factor or 1)


def relative(frame: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """A metric of the optimistic form over that of the exact one, per source, shape and drift."""
    rows = pick(frame, metric=metric, pattern="upward")
    keys = ["source", "device", "seqlen_k", "head_dim", "nats"]
    if rows.empty:
        return pandas.DataFrame(columns=[*keys, "ratio"])
    rows = rows.assign(device=rows["device"].fillna(""))
    wide = rows.pivot_table(index=keys, columns="implementation", values="value")
    wide = wide.reindex(columns=[EXACT, OPTIMISTIC])
    return (wide[OPTIMISTIC] / wide[EXACT]).rename("ratio").dropna().reset_index()


@claim(
    "optimistic softmax",
    "optimistic softmax errs no more than the exact one, at every drift of the scores tried",
    OURS,
    experiments=("optimistic", "gpu-optimistic"),
    shown="optimistic_softmax",
    conditions="executed on the host; the time is not measured",
    overturn=(Scale({"implementation": "flash-sm90-optimistic"}, only="up"),),
    as_claimed=setting(1e-4, metric="rmse", **RAN),
    compared=False,
)
def optimistic_softmax(frame: pandas.DataFrame) -> Finding:
    """Repair restores the exact kernel's error; where nothing is flagged, it is about the same."""
    ours = pick(frame, experiment="optimistic", source="measured")
    rmse = known(ours, metric="rmse", tensor="out")
    wide = rmse.pivot_table(index=["pattern", "nats"], columns="implementation", values="value")
    wide = wide.reindex(columns=[EXACT, OPTIMISTIC]).dropna()
    most = float((wide[OPTIMISTIC] / wide[EXACT]).where(wide[EXACT] > 0, 1.0).max())
    start = onset("upward", SEQLEN_K, first_key_looked_at(cells()[0]))
    first = pick(ours, metric="flagged_share", pattern="upward", value=1.0)["nats"].min()
    times = relative(frame, "time_ms")["ratio"]
    speed = f"{times.min():.2f} to {times.max():.2f} of exact" if len(times) else NOT_MEASURED
    what = "its RMSE over the exact kernel's, worst drift"
    return Finding(
        predicted=f"repair from {start:.1f} nats of drift on",
        measured=f"error at most {most - 1:+.0%}; all tiles repaired from {first:g} nats on; time: {speed}",
        parts=[
            Part(what, most, Evidence.COUNTED, high=1.0, limits=LIMITS, why=STATED.because, form=".2f", kind=STATED)
        ],
    )
