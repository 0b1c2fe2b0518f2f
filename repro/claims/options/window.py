"""A sliding window, and what its tiles load."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement, exact
from repro.claims.register import Finding, claim
from repro.claims.tolerances import MEMORY
from repro.claims.values import against_sums, known, off, pick, worst
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
    rows = known(frame, metric="traffic_bytes")
    found = rows.groupby(["source", *KEYS], as_index=False)["value"].sum()
    of_k = pick(rows, tensor="k").groupby(["source", *KEYS])["value"].sum().rename("keys")
    found = found.join(of_k, on=["source", *KEYS])
    for name, metric in (("pairs", "visible_pairs"), ("lowest", "compulsory_bytes")):
        least = pick(frame, metric=metric, source="predicted").groupby(KEYS)["value"].first()
        found = found.join(least.rename(name), on=KEYS)
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
    keys = ["way", "pass", "seqlen_q", "window_left", "block_m", "block_n", "kernel", "tensor", "direction"]
    ratio = against_sums(pick(frame, metric="traffic_bytes"), keys)
    seen = pick(excess(totals(frame)), source="measured")
    even = worst(seen[seen["window"] == seen["block_m"]]["excess"] / 2)
    what = "pairs loaded over 2 for each one seen at w = Br, N = 1024"
    return Finding(
        predicted="sums over a window's tiles; 2 pairs loaded for each one seen at w = Br",
        measured=f"{len(ratio)} tensors, {off(worst(ratio))}; {2 * even:.2f}",
        parts=[
            exact("counted over predicted, worst tensor", worst(ratio)),
            agreement(what, even, 1, MEMORY, Evidence.COUNTED, why="the first rows see less than a whole window"),
        ],
    )
