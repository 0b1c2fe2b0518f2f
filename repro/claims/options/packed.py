"""Packed sequences beside padded ones."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, exact
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.values import pick, worst
from repro.claims.works import OURS
from repro.experiments.bytes.packed_sequences import EXECUTED

KEYS = ["dataset", "way", "batch", "sequences"]


def totals(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Forward + backward for each real token, in bytes, by source; ``lowest``: each tensor once."""
    empty = pandas.DataFrame(columns=["source", *KEYS, "value", "tokens", "lowest", "per_token"])
    if "way" not in frame:
        return empty
    rows = pick(frame, metric="traffic_bytes").dropna(subset=["value"])
    rows = rows[rows["pass"].isin(["forward", "backward"])]
    found = rows.groupby(["source", *KEYS], as_index=False)["value"].sum()
    for name, metric, how in (("tokens", "tokens", "first"), ("lowest", "compulsory_bytes", "sum")):
        known = pick(frame, metric=metric, source="predicted").groupby(KEYS)["value"].agg(how)
        found = found.join(known.rename(name), on=KEYS)
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
    rows = pick(frame, metric="traffic_bytes").dropna(subset=["value"])
    keys = [*KEYS, "pass", "kernel", "tensor", "direction"]
    wide, off = pandas.DataFrame(), float("nan")
    if "way" in rows:
        wide = rows.pivot_table(index=keys, columns="source", values="value")
        wide = wide.reindex(columns=["predicted", "measured"]).dropna()
        off = worst(wide["measured"] / wide["predicted"])
    table = pick(totals(frame), source="measured", dataset="wikipedia", batch=EXECUTED)
    value = {way: pick(table, way=way)["value"].sum() for way in ("longest", "packed")}
    ratio = value["longest"] / value["packed"] if value["packed"] else float("nan")
    share = pick(frame, metric="padded_share", dataset="wikipedia")["value"]
    of_padding = float(share.iloc[0]) if len(share) else float("nan")
    return Finding(
        predicted="the sum over sequences and their tables; padded: as many of the longest",
        measured=f"{len(wide)} tensors, worst {off - 1:+.2%}; padded moves {ratio:.2f} times as much"
        if len(wide)
        else NOT_MEASURED,
        published="up to half of the tokens are padding (Krell et al. 2021, abstract)",
        parts=[
            exact("counted over predicted, worst tensor", off),
            Part(
                what="bytes of 16 Wikipedia sequences padded over packed",
                value=ratio,
                low=2.0,
                high=3.0,
                evidence=Evidence.COUNTED,
            ),
            Part(
                what="share of padding at 512 tokens",
                value=of_padding,
                low=0.495,
                high=0.505,
                evidence=Evidence.DERIVED,
            ),
        ],
    )
