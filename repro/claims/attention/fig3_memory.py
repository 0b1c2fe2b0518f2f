"""FlashAttention 2022, Fig. 3 right: peak memory against N."""

from __future__ import annotations

import pandas

from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import HEADLINE, MEMORY, PRINTED
from repro.claims.values import pick, worst
from repro.claims.works import FA1, OURS

MIB = 2**20


#: q, k, v and dout are there before the pass; the rest of "allocated before" is the workspace.
INPUTS = 4


PAPER = {"standard": "standard", "flash1": "FlashAttention"}


TODAY = {"standard-eager": "standard (eager)", "sdpa-flash2": "FlashAttention-2 (sdpa)"}


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
    experiments=("fig3-memory",),
    shown="fa1_fig3_memory",
    conditions="H200, PyTorch 2.11, whose standard attention keeps 4 Nd less",
    overturn=(
        Scale({"implementation": "sdpa-flash2"}, 2.1),  # limits of a factor of 1.5
        Scale({"implementation": "flash1"}, 2.1, source="published"),
    ),
    compared=False,
)
def fa_1_fig_3_right(frame: pandas.DataFrame) -> Finding:
    rows = prepared(frame)
    paper = pandas.concat([agreement_of(rows, name, "published") for name in PAPER])
    like = []
    for old, new in zip(PAPER, TODAY, strict=True):
        printed, now = (
            pick(rows, implementation=name, source=source).set_index("seqlen_q")["mib"].dropna()
            for name, source in ((old, "published"), (new, "measured"))
        )
        like.append((now / printed).dropna())
    beside = pandas.concat(like)
    return Finding(
        predicted=f"4 N² + 10 Nd; 13 Nd + 2 rows: {len(paper)} printed points within "
        f"{abs(worst(paper) - 1):.2%}, integers chosen to match",
        measured=f"{beside.min():.2f} to {beside.max():.2f} of the printed MB at {len(beside)} "
        "lengths (H200, PyTorch's allocator)"
        if len(beside)
        else NOT_MEASURED,
        published="Table 21",
        parts=[
            agreement(
                "measured over printed, worst length",
                worst(beside),
                1,
                MEMORY,
                Evidence.OTHER,
                limits=1.5,
                why="short sequences keep less today",
                otherwise=agreement("printed over the list, worst", worst(paper), 1, PRINTED, Evidence.PUBLISHED),
            )
        ],
    )


@claim(
    "FA-1 20x memory",
    "up to 20x less memory than standard attention (N = 4096)",
    FA1,
    "section 4.3",
    experiments=("fig3-memory",),
    shown="fa1_fig3_memory",
    conditions="H200, PyTorch 2.11; workspace taken off",
    overturn=(Scale({"implementation": "sdpa-flash2"}, 1.7),),
    compared=False,
)
def fa_1_20x_memory(frame: pandas.DataFrame) -> Finding:
    rows = prepared(frame)

    def at(name: str, source: str) -> float:
        some = pick(rows, implementation=name, source=source, seqlen_q=4096)["mib"].dropna()
        return float(some.iloc[0]) if len(some) else float("nan")

    printed, model = (at("standard", source) / at("flash1", source) for source in ("published", "predicted"))
    now = at("standard-eager", "measured") / at("sdpa-flash2", "measured")
    return Finding(
        predicted=f"{model:.1f}x",
        measured=f"{now:.1f}x (H200)" if now == now else NOT_MEASURED,
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
    experiments=("fig3-memory",),
    shown="fa1_fig3_memory",
    conditions="the matrix library's workspace is taken off",
    overturn=(Scale(),),
    chosen="the lists of live tensors were written with the peaks in sight",
)
def peak_memory_lists(frame: pandas.DataFrame) -> Finding:
    rows = prepared(frame)
    today = pandas.concat([agreement_of(rows, name, "measured") for name in TODAY])
    return Finding(
        predicted="lists of live tensors",
        measured=f"{len(today)} points, worst {worst(today) - 1:+.2%} (H200)" if len(today) else NOT_MEASURED,
        parts=[agreement("measured over the list, worst length", worst(today), 1, MEMORY, Evidence.OTHER)],
    )
