"""FlashAttention 2022, Fig. 3 left: run time against N."""

from __future__ import annotations

import math

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import HEADLINE
from repro.claims.values import pick
from repro.claims.works import FA1


def both_passes(frame: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """Rows of the paper's run and of the H200's."""
    rows = pick(frame, metric=["time_ms", "run"], pass_="forward+backward")
    paper = rows[rows["source"].ne("measured") & rows["dropout"].eq(0.1) & rows["key_mask"].eq(True)]
    today = rows[rows["source"].ne("published") & rows["dropout"].eq(0.0) & rows["key_mask"].eq(False)]
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
    conditions="the paper's 3x is Table 11, with mask and dropout, by FlashAttention 1 on an A100; "
    "the H200 ran PyTorch 2.11's FlashAttention-2 without either, for which Table 20 prints less",
    other="no card here has run FlashAttention 1 with mask and dropout",
    overturn=(Scale({"implementation": "flash1", "pass": "forward+backward"}, source="published"),),
    compared=False,
)
def fa_1_fig_3_left(frame: pandas.DataFrame) -> Finding:
    """The printed speed-ups of both tables, the rooflines', and what runs today."""
    rows = both_passes(frame)
    plain = pick(frame, metric="time_ms", pass_="forward+backward", dropout=0.0, key_mask=False)

    def speedup(table: pandas.DataFrame, slow: str, fast: str, source: str) -> list[float]:
        ratios = [at(table, slow, source, n) / at(table, fast, source, n) for n in (512, 1024, 2048)]
        return [r for r in ratios if math.isfinite(r)]

    def shown(ratios: list[float]) -> str:
        return ", ".join(f"{r:.1f}" for r in ratios) + "x" if ratios else NOT_MEASURED

    printed = speedup(rows["paper"], "standard", "flash1", "published")
    without = speedup(plain, "standard", "flash1", "published")
    now = speedup(rows["today"], "standard-eager", "sdpa-flash2", "measured")
    floors = speedup(rows["paper"], "standard", "flash1", "predicted")
    return Finding(
        predicted=f"{shown(floors)} (rooflines, A100: what bytes and products alone allow)",
        measured=f"{shown(now)} without mask and dropout (H200, FlashAttention-2)" if now else NOT_MEASURED,
        published=f"{shown(printed)}; {shown(without)} without mask and dropout (Table 20)",
        parts=[
            agreement(
                "best printed speed-up at N = 512 to 2048 over 3",
                max(printed, default=math.nan),
                3,
                HEADLINE,
                Evidence.PUBLISHED,
            )
        ],
    )
