"""FlashAttention 2022, Fig. 3 right: peak memory against N."""

from __future__ import annotations

from typing import Any

import pandas

from repro.claims.attention.like import by_length, ratio, share_of_octaves
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement, share_of
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import HEADLINE, MEMORY, PRINTED
from repro.claims.values import NAN, by, known, off, pick, worst
from repro.claims.works import FA1, H200, OURS, RECOMPUTE

MIB = 2**20
#: q, k, v and dout are there before the pass; the rest of "allocated before" is the workspace.
INPUTS = 4
PAPER = {"standard": "standard", "flash1": "FlashAttention"}
TODAY = {"standard-eager": "standard (eager)", "sdpa-flash2": "FlashAttention-2 (sdpa)"}
SEEN: dict[str, Any] = {"experiments": ("fig3-memory",), "shown": "fa1_fig3_memory"}


def prepared(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Rows of the plain run in MiB, workspace taken off where it is on record."""
    rows = pick(frame, metric="peak_memory_bytes", dropout=0.0, key_mask=False).copy()
    operand = rows["batch"] * rows["heads"] * rows["seqlen_q"] * rows["head_dim"] * 2
    before = rows["allocated_before_bytes"] if "allocated_before_bytes" in rows else float("nan")
    rows["workspace"] = (before - INPUTS * operand).fillna(0.0)
    rows["mib"] = (rows["value"] - rows["workspace"]) / MIB
    return rows


def without_workspace(frame: pandas.DataFrame, name: str, source: str) -> pandas.Series:
    """Peak MiB by length."""
    rows = pick(prepared(frame), implementation=name, source=source).dropna(subset=["mib"])
    found: pandas.Series = rows.set_index("seqlen_q")["mib"]
    return found


def agreement_of(rows: pandas.DataFrame, name: str, kind: str) -> pandas.Series:
    """Observed over predicted MiB, by length; the paper prints whole MB."""
    observed = pick(rows, implementation=name, source=kind).set_index("seqlen_q")["mib"].dropna()
    model = pick(rows, implementation=name, source="predicted").set_index("seqlen_q")["mib"]
    return observed / model.reindex(observed.index)


@claim(
    "FA-1 Fig. 3 right",
    "peak memory of standard attention and of FlashAttention, 16 printed points",
    FA1,
    "Table 21",
    **SEEN,
    conditions="H200, PyTorch 2.11, whose standard attention keeps 4 Nd less and whose flash attention 1 Nd less",
    overturn=(Scale({"implementation": "sdpa-flash2"}, 1.5), Scale({"implementation": "flash1"}, 1.5, "published")),
)
def fa_1_fig_3_right(frame: pandas.DataFrame) -> Finding:
    rows = prepared(frame)
    paper = pandas.concat([agreement_of(rows, name, "published") for name in PAPER])
    ratio = pandas.concat(
        [
            by(rows.assign(value=rows["mib"]), "seqlen_q", implementation=new, source="measured")
            / by(rows.assign(value=rows["mib"]), "seqlen_q", implementation=old, source="published")
            for old, new in zip(PAPER, TODAY, strict=True)
        ]
    ).dropna()
    return Finding(
        predicted=f"4 N² + 10 Nd; 13 Nd + 2 rows: {len(paper)} printed points within "
        f"{abs(worst(paper) - 1):.2%}, integers chosen to match",
        measured=f"{ratio.min():.2f} to {ratio.max():.2f} of the printed MB at {len(ratio)} "
        "lengths (H200, PyTorch's allocator)",
        published="Table 21",
        parts=[
            agreement("printed over the list, worst length", worst(paper), 1, PRINTED, Evidence.PUBLISHED),
            share_of(
                "share of printed points within a tenth of which a peak is today",
                ratio.between(1 / (MEMORY.factor or 1), MEMORY.factor),
                Evidence.OTHER,
                "short sequences keep less today",
            ),
        ],
    )


@claim(
    "FA-1 20x memory",
    "up to 20x less memory than standard attention (N = 4096)",
    FA1,
    "section 4.3",
    **SEEN,
    conditions="H200, PyTorch 2.11; workspace taken off",
    overturn=(Scale({"implementation": "sdpa-flash2"}, 1.7),),
    compared=False,
)
def fa_1_20x_memory(frame: pandas.DataFrame) -> Finding:
    at = known(prepared(frame), seqlen_q=4096).set_index(["source", "implementation"])["mib"]
    printed, model, now = (
        float(at.get((source, slow), NAN) / at.get((source, fast), NAN))
        for source, slow, fast in (
            ("published", "standard", "flash1"),
            ("predicted", "standard", "flash1"),
            ("measured", "standard-eager", "sdpa-flash2"),
        )
    )
    return Finding(
        predicted=f"{model:.1f}x",
        measured=f"{now:.1f}x (H200)",
        published=f"{printed:.1f}x",
        parts=[
            agreement(
                "measured ratio at N = 4096 over 20",
                now,
                20,
                HEADLINE,
                Evidence.OTHER,
                otherwise=agreement("printed ratio over 20", printed, 20, HEADLINE, Evidence.PUBLISHED),
            )
        ],
    )


@claim(
    "peak memory, lists",
    "peak memory of attention is the sum of the tensors alive: 4 N² + 6 Nd; 12 Nd + 2 rows",
    OURS,
    **SEEN,
    conditions="the matrix library's workspace is taken off",
    overturn=(Scale(),),
    chosen="the lists of live tensors were written with the peaks in sight",
)
def peak_memory_lists(frame: pandas.DataFrame) -> Finding:
    rows = prepared(frame)
    today = pandas.concat([agreement_of(rows, name, "measured") for name in TODAY])
    return Finding(
        predicted="lists of live tensors",
        measured=f"{len(today)} points, {off(worst(today))} (H200)" if len(today) else NOT_MEASURED,
        parts=[agreement("measured over the list, worst length", worst(today), 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "K3, memory",
    "flash attention takes 5 to 20 times less memory",
    RECOMPUTE,
    "section 9.2",
    **SEEN,
    conditions=f"{H200}; the matrix library's workspace is taken off. The factor grows with N, so "
    "a range of 4x holds three lengths, each twice the one before",
    overturn=(Scale({"implementation": "sdpa-flash2", "metric": "peak_memory_bytes"}, 30),),
    compared=False,
)
def k3_memory(frame: pandas.DataFrame) -> Finding:
    """Peak memory of standard over flash by sequence length."""
    now = without_workspace(frame, "standard-eager", "measured") / without_workspace(frame, "sdpa-flash2", "measured")
    paper = ratio(frame, "peak_memory_bytes", "forward+backward", source="published", over="standard", under="flash1")
    model = ratio(frame, "peak_memory_bytes", "forward+backward", source="predicted")
    return Finding(
        predicted="grows with N: " + by_length(model),
        measured=by_length(now.dropna()) + " (H200)",
        published=by_length(paper) + " (A100)",
        parts=[share_of_octaves("5 to 20x", now.dropna(), 5, 20)],
    )
