"""Packed sequences beside padded ones."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement, between, exact
from repro.claims.register import Finding, claim
from repro.claims.tolerances import PRINTED
from repro.claims.values import NAN, against_sums, known, off, one, pick, worst
from repro.claims.works import OURS
from repro.experiments.bytes.packed_sequences import EXECUTED

KEYS = ["dataset", "way", "batch", "sequences"]


def totals(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Forward + backward for each real token, in bytes, by source; ``lowest``: each tensor once."""
    empty = pandas.DataFrame(columns=["source", *KEYS, "value", "tokens", "lowest", "per_token"])
    if "way" not in frame:
        return empty
    rows = known(frame, metric="traffic_bytes", pass_=["forward", "backward"])
    found = rows.groupby(["source", *KEYS], as_index=False)["value"].sum()
    for name, metric, how in (("tokens", "tokens", "first"), ("lowest", "compulsory_bytes", "sum")):
        least = pick(frame, metric=metric, source="predicted").groupby(KEYS)["value"].agg(how)
        found = found.join(least.rename(name), on=KEYS)
    found["per_token"] = found["value"] / found["tokens"] / 1e3
    return found


@claim(
    "packed sequences",
    "packed sequences move the sum of what each moves alone, and their tables; 16 of "
    "Wikipedia's, padded to the longest, move twice to three times that",
    OURS,
    experiments=("packed-sequences",),
    shown="packed_sequences",
    conditions="executed on the host; no time and no card's counter yet",
    chosen="the range of two to three times",
    overturn=(
        Scale({"metric": "traffic_bytes", "tensor": "k", "way": "packed"}),
        Scale({"metric": "traffic_bytes", "way": "longest", "source": "measured"}),
    ),
)
def packed_sequences(frame: pandas.DataFrame) -> Finding:
    """Counted bytes are the predicted ones; the padding that was published; what it costs."""
    rows = pick(frame, metric="traffic_bytes")
    ratio = against_sums(rows, [*KEYS, "pass", "kernel", "tensor", "direction"])
    table = pick(totals(frame), source="measured", dataset="wikipedia", batch=EXECUTED)
    moved = table.groupby("way")["value"].sum()
    padded = float(moved.get("longest", NAN) / moved.get("packed", NAN))
    share = one(frame, metric="padded_share", dataset="wikipedia")
    return Finding(
        predicted="the sum over sequences and their tables; padded: as many of the longest",
        measured=f"{len(ratio)} tensors, {off(worst(ratio))}; padded moves {padded:.2f} times as much",
        published="up to half of the tokens are padding (Krell et al. 2021, abstract)",
        parts=[
            exact("counted over predicted, worst tensor", worst(ratio)),
            between("bytes of 16 Wikipedia sequences padded over packed", padded, 2.0, 3.0, Evidence.COUNTED),
            agreement("share of padding at 512 tokens, over a half", share, 0.5, PRINTED, Evidence.DERIVED),
        ],
    )
