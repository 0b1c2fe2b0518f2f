"""Where to put a checkpoint, and in which mode: K14, F6, Korthikanti's Eq. 1."""

from __future__ import annotations

import pandas

from repro.claims.checkpointing.depth import NAN
from repro.claims.mutations import RAN, Scale, every, times
from repro.claims.protocol import Evidence, Part, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import MEMORY
from repro.claims.values import one, text
from repro.claims.works import CODE, KORTHIKANTI, OURS, RECOMPUTE


@claim(
    "granularity",
    "bytes a layer keeps, for eight places to put a checkpoint, are the formula's",
    OURS,
    experiments=("checkpoint-granularity",),
    shown="checkpoint_granularity",
    conditions="PyTorch on a CPU, by its hooks",
    overturn=(Scale(),),
)
def granularity(frame: pandas.DataFrame) -> Finding:
    """Bytes a layer keeps at every granularity (checkpoint-granularity)."""
    rows = frame[(frame["metric"] == "saved_bytes_per_layer") & frame["value"].notna()]
    wide = rows.pivot_table(index=["implementation", "mode"], columns="source", values="value")
    worst, count = NAN, 0
    if {"measured", "predicted"} <= set(wide) and len(wide.dropna()):
        ratio = (wide["measured"] / wide["predicted"]).dropna()
        worst, count = float(ratio.iloc[(ratio - 1).abs().argmax()]), len(ratio)
    return Finding(
        predicted="item by item",
        measured=f"worst of {count} {worst - 1:+.2%}" if count else NOT_MEASURED,
        parts=[agreement("bytes a layer keeps over the formula, worst", worst, 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "checkpoint each operation",
    "a checkpoint around each operation saves most memory",
    RECOMPUTE,
    "section 5.1",
    experiments=("checkpoint-granularity",),
    shown="checkpoint_granularity",
    as_claimed=times(0.5, metric="saved_bytes_per_layer", implementation="each operation", **RAN),
    compared=False,
)
def checkpoint_each_operation(frame: pandas.DataFrame) -> Finding:
    """A checkpoint around each operation against none at all (checkpoint-granularity)."""
    wanted = {"metric": "saved_bytes_per_layer", "source": "measured", "mode": "new"}
    finest = one(frame, implementation="each operation", **wanted)
    none = one(frame, implementation="none", **wanted)
    return Finding(
        predicted="three N² maps of inputs are kept instead of two and a mask",
        measured=f"{text(finest / none)}x the bytes of no checkpoint",
        parts=[
            Part(
                what="bytes a layer keeps over those without a checkpoint",
                value=finest / none,
                high=1.0,
                form=".2f",
                evidence=Evidence.OTHER,
            )
        ],
    )


@claim(
    "K14, F6",
    "reentrant checkpoints keep intermediate results; non-reentrant ones keep none, and need O(1) "
    "instead of O(N) memory",
    CODE,
    "section 1",
    experiments=("checkpoint-granularity",),
    shown="checkpoint_granularity",
    as_claimed=every(
        times(0.1, metric="saved_bytes_per_layer", implementation="each block", mode="new", **RAN),
        times(0.2, metric="saved_bytes_per_layer", implementation="each block", mode="reentrant", **RAN),
    ),
    compared=False,
)
def k14(frame: pandas.DataFrame) -> Finding:
    """The notes on the two modes: O(N) to O(1) without reentry, less saving with it."""

    def kept(mode: str, source: str = "measured") -> float:
        return one(frame, metric="saved_bytes_per_layer", source=source, implementation="each block", mode=mode)

    new, old, model = kept("new"), kept("reentrant"), kept("new", "predicted")
    return Finding(
        predicted=f"{model:,.0f} B a block in both modes: its input, O(N) in layers",
        measured=f"{text(new, ',.0f')} and {text(old, ',.0f')} B a block",
        parts=[
            Part(
                what="bytes a block, non-reentrant, over the block's input",
                value=new / model,
                high=0.5,
                form=".2f",
                evidence=Evidence.OTHER,
            ),
            Part(
                what="bytes a block, reentrant over non-reentrant",
                value=old / new,
                low=1.05,
                form=".2f",
                evidence=Evidence.OTHER,
            ),
        ],
    )


@claim(
    "Korthikanti Eq. 1",
    "a layer saves sbh(34 + 5as/h) bytes, 34 sbh with selective recomputation",
    KORTHIKANTI,
    "Eq. 1",
    experiments=("checkpoint-layer-bytes",),
    shown="checkpoint_layer_bytes",
    conditions="one layer in PyTorch on a CPU",
    overturn=(Scale(),),
)
def korthikanti_eq_1(frame: pandas.DataFrame) -> Finding:
    """sbh(34 + 5as/h) and 34 sbh (checkpoint-layer-bytes, lengths of 128 and more)."""
    rows = frame[(frame["metric"] == "saved_bytes_per_layer") & (frame["seqlen_q"] >= 128)]
    wide = rows.pivot_table(index=["implementation", "seqlen_q"], columns="source", values="value")
    worst, count = NAN, 0
    if "measured" in wide and wide["measured"].notna().any():
        ratio = (wide["measured"] / wide["predicted"]).dropna().drop("full", errors="ignore")
        worst, count = float(ratio.iloc[(ratio - 1).abs().argmax()]), len(ratio)
    return Finding(
        predicted="item by item",
        measured=f"worst of {count} {worst - 1:+.2%} (PyTorch's hooks)" if count else NOT_MEASURED,
        published="sbh(34 + 5as/h), 34 sbh",
        parts=[agreement("saved bytes over the formula, worst", worst, 1, MEMORY, Evidence.OTHER)],
    )
