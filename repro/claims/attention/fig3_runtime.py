"""FlashAttention 2022, Fig. 3 left: run time against N, and where Linformer overtakes."""

from __future__ import annotations

from typing import Any

import pandas

from repro.claims.attention.like import ratio
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement, less, more
from repro.claims.register import Finding, claim
from repro.claims.tolerances import HEADLINE
from repro.claims.values import NAN, over, pick
from repro.claims.works import FA1

LENGTHS = (512, 1024, 2048)
#: The paper's run: Table 11.
WITH_BOTH: dict[str, Any] = {"metric": "time_ms", "pass_": "forward+backward", "dropout": 0.1, "key_mask": True}


def both_passes(frame: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """Rows of the paper's run and of the H200's."""
    rows = pick(frame, metric=["time_ms", "run"], pass_="forward+backward")
    paper = rows[rows["source"].ne("measured") & rows["dropout"].eq(0.1) & rows["key_mask"].eq(True)]
    today = rows[rows["source"].ne("published") & rows["dropout"].eq(0.0) & rows["key_mask"].eq(False)]
    return {"paper": paper, "today": today}


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
    both = "time_ms", "forward+backward"
    printed, floors = (
        over(frame, "standard", "flash1", "seqlen_q", source=s, **WITH_BOTH) for s in ("published", "predicted")
    )
    without = ratio(frame, *both, source="published", over="standard", under="flash1")
    now = ratio(frame, *both)

    def shown(ratios: pandas.Series) -> str:
        return ", ".join(f"{v:.1f}" for v in ratios.reindex(LENGTHS)) + "x"

    best = float(printed.reindex(LENGTHS).max())
    return Finding(
        predicted=f"{shown(floors)} (rooflines, A100: what bytes and products alone allow)",
        measured=f"{shown(now)} without mask and dropout (H200, FlashAttention-2)",
        published=f"{shown(printed)}; {shown(without)} without mask and dropout (Table 20)",
        parts=[agreement("best printed speed-up at N = 512 to 2048 over 3", best, 3, HEADLINE, Evidence.PUBLISHED)],
    )


@claim(
    "FA-1 and Linformer",
    "FlashAttention is faster than Linformer up to a length between 512 and 1024",
    FA1,
    "Fig. 3 left",
    experiments=("fig3-runtime",),
    shown="fa1_fig3_runtime",
    conditions="nothing was run: the figure against its own table",
    compared=False,
    overturn=(Scale({"implementation": "Linformer"}, 1.7, source="published"),),
)
def linformer(frame: pandas.DataFrame) -> Finding:
    times = over(frame, "Linformer", "flash1", "seqlen_q", source="published", **WITH_BOTH)
    return Finding(
        published=", ".join(f"{v:.2f}x at {n:g}" for n, v in times.items() if 256 <= n <= 2048) or "-",
        parts=[
            more("Linformer's time over FlashAttention's, N = 512", float(times.get(512, NAN)), Evidence.PUBLISHED),
            less("the same at N = 1024", float(times.get(1024, NAN)), Evidence.PUBLISHED),
        ],
    )
