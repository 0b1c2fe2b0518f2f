"""A sliding window, and what its tiles load."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, exact
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.values import pick, worst
from repro.claims.works import OURS
from repro.experiments.bytes.sliding_window import HEAD_DIM

KEYS = ["way", "pass", "seqlen_q", "window", "block_m", "block_n"]


ROW_BYTES = 2 * HEAD_DIM


def totals(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes of each pass by source; ``keys``: those of K alone; ``pairs``: that the window leaves;
    ``lowest``: each tensor once."""
    if "window_left" not in frame:
        return pandas.DataFrame(columns=["source", *KEYS, "value", "keys", "pairs", "lowest"])
    frame = frame.assign(window=frame["window_left"].fillna(-1).astype(int) + 1)
    rows = pick(frame, metric="traffic_bytes").dropna(subset=["value"])
    found = rows.groupby(["source", *KEYS], as_index=False)["value"].sum()
    of_k = pick(rows, tensor="k").groupby(["source", *KEYS])["value"].sum().rename("keys")
    found = found.join(of_k, on=["source", *KEYS])
    for name, metric in (("pairs", "visible_pairs"), ("lowest", "compulsory_bytes")):
        known = pick(frame, metric=metric, source="predicted").groupby(KEYS)["value"].first()
        found = found.join(known.rename(name), on=KEYS)
    return found


def excess(table: pandas.DataFrame) -> pandas.DataFrame:
    """Forward: pairs in the tiles visited, which the bytes of K tell, over pairs that are seen."""
    rows = pick(table, way="window", pass_="forward").copy()
    rows["excess"] = rows["keys"] / ROW_BYTES * rows["block_m"] / rows["pairs"]
    return rows


@claim(
    "sliding window",
    "a window of w keys loads only the tiles that it touches, 1 + Br / w times its pairs",
    OURS,
    experiments=("sliding-window",),
    shown="sliding_window",
    conditions="executed on the host; no time and no card's counter yet",
    overturn=(
        Scale({"metric": "traffic_bytes", "tensor": "k", "way": "window"}),
        Scale({"metric": "traffic_bytes", "way": "stored mask"}),
    ),
)
def sliding_window(frame: pandas.DataFrame) -> Finding:
    """Counted bytes are the predicted ones, and what a tile as large as its window costs."""
    rows = pick(frame, metric="traffic_bytes").dropna(subset=["value"]).copy()
    keys = ["way", "pass", "seqlen_q", "window_left", "block_m", "block_n", "kernel", "tensor", "direction"]
    off, wide = float("nan"), pandas.DataFrame()
    if "window_left" in rows:
        rows["window_left"] = rows["window_left"].fillna(-1)
        wide = rows.pivot_table(index=keys, columns="source", values="value")
        wide = wide.reindex(columns=["predicted", "measured"]).dropna()
        off = worst(wide["measured"] / wide["predicted"])
    over = pick(excess(totals(frame)), source="measured")
    even = over[over["window"] == over["block_m"]]["excess"]
    at = worst(even / 2) * 2 if len(even) else float("nan")
    return Finding(
        predicted="sums over a window's tiles; 2 pairs loaded for each one seen at w = Br",
        measured=f"{len(wide)} tensors, worst {off - 1:+.2%}; {at:.2f}" if len(wide) else NOT_MEASURED,
        parts=[
            exact("counted over predicted, worst tensor", off),
            Part(
                what="pairs loaded over pairs seen at w = Br, N = 1024",
                value=at,
                low=1.9,
                high=2.1,
                evidence=Evidence.COUNTED,
            ),
        ],
    )
