"""Bytes of a stored bias and of ALiBi."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import exact
from repro.claims.register import Finding, claim
from repro.claims.values import NAN, against_sums, known, off, pick, worst
from repro.claims.works import OURS
from repro.experiments.bytes.bias_bytes import EXECUTED

MB = 1e6
FIELDS = ["source", "implementation", "scores", "pass", "seqlen_q"]


def totals(frame: pandas.DataFrame) -> pandas.DataFrame:
    """All bytes of a pass by source, a row a cell, and ``lowest``: each tensor once a kernel."""
    rows = known(frame, metric="traffic_bytes")
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
    ratio = against_sums(pick(frame, metric="traffic_bytes"), [*FIELDS[1:], "kernel", "tensor", "direction"])
    # A slope is 4 bytes a tile, a bias an element a pair: counted at the longest sequence executed.
    longest = pick(totals(frame), source="measured", seqlen_q=EXECUTED[-1])
    counted = longest.groupby("scores")["value"].sum().reindex(["plain", "bias", "alibi"])
    _, bias, alibi = counted - counted.get("plain", NAN)
    return Finding(
        predicted="sums over the tile loop, by tensor and direction",
        measured=f"{len(ratio)} tensors, {off(worst(ratio))}; both passes at N = {EXECUTED[-1]} move "
        f"{bias / MB:.2f} MB more with a stored bias, {alibi / 1e3:.2f} kB more with ALiBi",
        parts=[exact("counted over predicted, worst tensor", worst(ratio))],
    )
