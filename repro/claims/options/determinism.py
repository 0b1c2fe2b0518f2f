"""The price of a deterministic backward, in bytes."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import exact
from repro.claims.register import Finding, claim
from repro.claims.values import NAN, against_sums, pick, worst
from repro.claims.works import OURS
from repro.experiments.bytes.deterministic_price import BASELINES, EXECUTED

LONGEST = EXECUTED[-1]


def change(value: float, base: float) -> str:
    """How much more than the base, in per cent of it, to two digits."""
    return f"{100 * (value / base - 1):+.2g}%"


def totals(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes per source, algorithm, length and mask."""
    rows = pick(frame, metric="traffic_bytes")
    keys = ["source", "implementation", "causal", "seqlen_q"]
    return rows.groupby(keys, as_index=False)["value"].sum()


@claim(
    "determinism",
    "what determinism costs in bytes: an ordered workspace, a pass for dQ, additions in turns",
    OURS,
    experiments=("deterministic-price",),
    shown="deterministic_price",
    conditions="bytes at the SM boundary, executed on the host; the time is not measured",
    overturn=(Scale(),),
)
def determinism(frame: pandas.DataFrame) -> Finding:
    """What determinism costs in bytes, and that the count is the prediction."""
    table = totals(frame)
    at = pick(table, causal=False, seqlen_q=LONGEST).set_index(["source", "implementation"])["value"]

    def each(source: str) -> str:
        """Every algorithm over its atomic form; nothing counted adds up to 0."""
        moved = at.get(source, pandas.Series(dtype=float)).replace(0, NAN)
        return ", ".join(f"{n} {change(moved.get(n, NAN), moved.get(base, NAN))}" for n, base in BASELINES.items())

    ratio = against_sums(table, ["implementation", "causal", "seqlen_q"])
    return Finding(
        predicted=f"{each('predicted')} over atomic additions, N = {LONGEST}",
        measured=each("measured"),
        parts=[exact("bytes counted over the sums, worst", worst(ratio))],
    )
