"""Which tile is best: K9."""

from __future__ import annotations

import pandas

from repro.claims.protocol import Evidence, Part
from repro.claims.register import Finding, claim
from repro.claims.tolerances import COUNT
from repro.claims.values import NAN, known, pick
from repro.claims.works import TILING


def tiles(some: pandas.DataFrame) -> str:
    return ", ".join(f"{r.block_m:.0f} x {r.block_n:.0f} (d = {r.head_dim:.0f})" for r in some.itertuples())


@claim(
    "K9",
    "the best tile is 128 to 256 on its longer side",
    TILING,
    "section 4.1",
    experiments=("tile-rules", "gpu-ladder"),
    shown="tile_rules",
    conditions="FlashAttention-2 as released, d = 256 on an H100, has 64 x 64",
    needs="the time of every tile on one card: `make measure EXPERIMENT=gpu-ladder` there",
)
def k9(frame: pandas.DataFrame) -> Finding:
    """The longer side of the fastest measured tile; without one, of the released kernels'."""
    rows = pick(frame, experiment="tile-rules")
    ours, released = (
        pick(rows, note=f"rule: {name}") for name in ("ours: least traffic, busy SMs", "released, FlashAttention-2")
    )
    timed = known(frame, experiment="gpu-ladder", source="measured", metric="time_ms", implementation="flash")
    fastest = timed.loc[timed.groupby("pass")["value"].idxmin()] if len(timed) else timed
    longer = fastest[["block_m", "block_n"]].max(axis=1)
    outside = float((~longer.between(128, 256)).sum()) if len(fastest) else NAN
    what = "fastest tiles whose longer side is not 128 to 256"
    return Finding(
        predicted=f"least traffic with busy SMs: {tiles(ours)}",
        measured=f"fastest: {tiles(fastest)}" if len(fastest) else "time over all tiles: not measured",
        published=f"{tiles(released)}, FlashAttention-2 as released",
        parts=[Part(what, outside, Evidence.HARDWARE, low=0, high=0, kind=COUNT)],
    )
