"""The highest rates of FlashAttention-2 and -3: text, figures, and what a card here does."""

from __future__ import annotations

import math

import pandas

from repro.claims.attention.like import FLASH
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import HEADLINE
from repro.claims.works import FA2, FA3


def _peak(frame: pandas.DataFrame, name: str, device: str, head_dim: int | None = None) -> float:
    rows = frame[
        (frame["metric"] == "throughput_tflops")
        & frame["implementation"].str.startswith(name)
        & (frame["pass"] == "forward")
        & frame["device"].fillna("").str.contains(device)
        & frame["dtype"].isin(["fp16", "bf16"])
    ]
    if head_dim is not None:
        rows = rows[rows["head_dim"] == head_dim]
    return float(rows["value"].max()) if len(rows) else math.nan


@claim(
    "FA-2 throughput",
    "up to 230 TFLOP/s, 73 % of an A100",
    FA2,
    "section 4 and figures",
    experiments=("throughput", "throughput-peers"),
    shown="throughput",
    conditions="text against its own figure; no A100 here",
    overturn=(Scale({"implementation": "flash2"}, source="published"),),
    compared=False,
)
def fa_2_throughput(frame: pandas.DataFrame) -> Finding:
    """FlashAttention-2's best forward rate in its figures, and the framework's copy on our card."""
    printed = _peak(frame, "flash2", "A100")
    rows = frame[
        (frame["source"] == "measured")
        & (frame["implementation"] == FLASH)
        & (frame["metric"] == "time_ms")
        & (frame["pass"] == "forward")
        & (frame["experiment"] == "throughput")
    ]
    best = math.nan
    if len(rows):
        flops = 4 * rows["batch"] * rows["heads"] * rows["seqlen_q"] ** 2 * rows["head_dim"]
        flops = flops / rows["causal"].map({True: 2, False: 1})
        best = float((flops / (rows["value"] * 1e-3) / 1e12).max())
    return Finding(
        predicted="230 / 312 = 73.7 % of peak",
        measured=NOT_MEASURED
        if math.isnan(best)
        else f"not on an A100; {best:.0f} TFLOP/s on an H200 (PyTorch's copy)",
        published=f"230 in the text, {printed:.0f} in the figures",
        parts=[agreement("highest label over the text's 230 TFLOP/s", printed, 230, HEADLINE, Evidence.PUBLISHED)],
    )


@claim(
    "FA-3 throughput",
    "up to 740 TFLOP/s in fp16, 75 % of an H100",
    FA3,
    "abstract and Fig. 5",
    experiments=("throughput", "throughput-peers"),
    shown="throughput",
    conditions="text against its own figure; its kernels were not run here",
    overturn=(Scale({"implementation": "flash3"}, source="published"),),
    compared=False,
)
def fa_3_throughput(frame: pandas.DataFrame) -> Finding:
    """FlashAttention-3's best fp16 forward rate: text and labels; its successor at d = 128."""
    published = frame[frame["source"] == "published"]
    printed = _peak(published, "flash3", "H100")
    figure = published[published["origin"].fillna("").str.contains("Fig. 5")]
    same = _peak(figure, "flash3", "H100", 128)
    best = _peak(frame[frame["source"] == "measured"], "flash-attn-4", "H200", 128)
    return Finding(
        predicted="740 / 989 = 74.8 % of peak",
        measured=NOT_MEASURED
        if math.isnan(best)
        else f"not its kernels; its successor at d = 128 on an H200: {best:.0f} TFLOP/s, "
        f"{best / same:.2f}x the {same:.0f} printed for d = 128 on an H100",
        published=f"740 in the text, {printed:.0f} the highest label (d = 256)",
        parts=[agreement("highest label over the text's 740 TFLOP/s", printed, 740, HEADLINE, Evidence.PUBLISHED)],
    )
