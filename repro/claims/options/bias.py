"""Bytes of a stored bias and of ALiBi."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import exact
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.values import pick, worst
from repro.claims.works import OURS
from repro.experiments.bytes.bias_bytes import EXECUTED

MB = 1e6


FIELDS = ["source", "implementation", "scores", "pass", "seqlen_q"]


def totals(frame: pandas.DataFrame) -> pandas.DataFrame:
    """All bytes of a pass by source, a row a cell, and ``lowest``: each tensor once a kernel."""
    rows = pick(frame, metric="traffic_bytes").dropna(subset=["value"])
    if rows.empty:
        return pandas.DataFrame(columns=[*FIELDS, "value", "lowest", "megabytes"])
    found = rows.groupby(FIELDS, dropna=False)["value"].sum().reset_index()
    bound = pick(frame, metric="compulsory_bytes").set_index(FIELDS[1:])["value"]
    found = found.join(bound.rename("lowest"), on=FIELDS[1:])
    found["megabytes"] = found["value"] / MB
    return found


@claim(
    "stored bias",
    "a stored bias moves N² elements a head in each pass, ALiBi 4 bytes a tile instead",
    OURS,
    experiments=("bias-bytes",),
    shown="bias_bytes",
    conditions="executed on the host; no time and no card's counter yet",
    overturn=(
        Scale({"metric": "traffic_bytes", "tensor": "bias"}),
        Scale({"metric": "traffic_bytes", "tensor": "alibi_slopes"}),
    ),
)
def stored_bias(frame: pandas.DataFrame) -> Finding:
    """Counted bytes are the predicted ones in every tensor; the least grows by N² with a bias."""
    keys = [*FIELDS[1:], "kernel", "tensor", "direction"]
    rows = pick(frame, metric="traffic_bytes").dropna(subset=["value"])
    wide = rows.pivot_table(index=keys, columns="source", values="value")
    wide = wide.reindex(columns=["predicted", "measured"]).dropna()
    off = worst(wide["measured"] / wide["predicted"])
    # A slope is 4 bytes a tile, a bias an element a pair: counted at the longest sequence executed.
    longest = pick(totals(frame), source="measured", seqlen_q=EXECUTED[-1])
    counted = longest.groupby("scores")["value"].sum()
    shown = f"{len(wide)} tensors, worst {off - 1:+.2%}"
    if {"plain", "alibi", "bias"} <= set(counted.index):
        more = {name: counted[name] - counted["plain"] for name in ("alibi", "bias")}
        shown += (
            f"; both passes at N = {EXECUTED[-1]} move {more['bias'] / MB:.2f} MB more with a "
            f"stored bias, {more['alibi'] / 1e3:.2f} kB more with ALiBi"
        )
    return Finding(
        predicted="sums over the tile loop, by tensor and direction",
        measured=shown if len(wide) else NOT_MEASURED,
        parts=[exact("counted over predicted, worst tensor", off)],
    )
