"""FlashAttention 2022, Fig. 3 left: run time against N."""

from __future__ import annotations

import math

import pandas

from repro.claims import works
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.values import pick
from repro.claims.works import FA1


def both_passes(frame: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """Rows of the paper's run and of the H200's."""
    rows = pick(frame, metric=["time_ms", "run"], pass_="forward+backward")
    paper = rows[
        rows["source"].ne("measured") & rows["dropout"].eq(0.1) & rows["key_mask"].eq(True)
    ]
    today = rows[
        rows["source"].ne("published") & rows["dropout"].eq(0.0) & rows["key_mask"].eq(False)
    ]
    return {"paper": paper, "today": today}


def at(rows: pandas.DataFrame, name: str, source: str, seqlen: int) -> float:
    """One time in ms, NaN where there is none."""
    some = pick(rows, implementation=name, source=source, seqlen_q=seqlen)["value"].dropna()
    return float(some.iloc[0]) if len(some) else float("nan")


@claim(
    "FA-1 Fig. 3 left",
    "up to 3x faster than standard attention for N up to 2K",
    FA1,
    "section 4.3, Fig. 3 left",
    experiments=("fig3-runtime",),
    shown="fa1_fig3_runtime",
    conditions=works.TODAY,
    overturn=(Scale({"implementation": "sdpa-flash2"}),),
)
def fa_1_fig_3_left(frame: pandas.DataFrame) -> Finding:
    """The speed-up the paper claims up to 2k, and how near to the roofline flash runs."""
    rows = both_passes(frame)
    paper, today = rows["paper"], rows["today"]

    def speedup(table: pandas.DataFrame, slow: str, fast: str, source: str) -> list[float]:
        ratios = [
            at(table, slow, source, n) / at(table, fast, source, n) for n in (512, 1024, 2048)
        ]
        return [r for r in ratios if math.isfinite(r)]

    def shown(ratios: list[float]) -> str:
        return ", ".join(f"{r:.1f}" for r in ratios) + "x" if ratios else NOT_MEASURED

    now = speedup(today, "standard-eager", "sdpa-flash2", "measured")
    near = at(today, "sdpa-flash2", "predicted", 4096) / at(today, "sdpa-flash2", "measured", 4096)
    return Finding(
        predicted=shown(speedup(paper, "standard", "flash1", "predicted")) + " (rooflines, A100)",
        measured=shown(now) + f" (H200; FlashAttention-2 at {near:.0%} of its roofline)"
        if now
        else NOT_MEASURED,
        published=shown(speedup(paper, "standard", "flash1", "published")),
        parts=[
            agreement(
                "best speed-up at N = 512 to 2048 over 3",
                max(now, default=math.nan),
                3,
                0.1,
                Evidence.HARDWARE,
            )
        ],
    )
