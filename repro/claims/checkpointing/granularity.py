"""Where to put a checkpoint, and in which mode: K14, F6, Korthikanti's Eq. 1."""

from __future__ import annotations

from typing import Any

import pandas

from repro.claims.mutations import RAN, Scale, every, times
from repro.claims.protocol import Evidence, Part, agreement, less
from repro.claims.register import Finding, claim
from repro.claims.tolerances import MEMORY, SHARE
from repro.claims.values import against_sums, one, pick, worst
from repro.claims.works import CODE, KORTHIKANTI, OURS, RECOMPUTE

KEPT = "saved_bytes_per_layer"
SEEN: dict[str, Any] = {"experiments": ("checkpoint-granularity",), "shown": "checkpoint_granularity"}


@claim(
    "granularity",
    "bytes a layer keeps, for eight places to put a checkpoint, are the formula's",
    OURS,
    **SEEN,
    conditions="PyTorch on a CPU, by its hooks",
    overturn=(Scale({"metric": KEPT}),),
)
def granularity(frame: pandas.DataFrame) -> Finding:
    """Bytes a layer keeps at every granularity (checkpoint-granularity)."""
    ratio = against_sums(pick(frame, metric=KEPT), ["implementation", "mode"])
    far = worst(ratio)
    return Finding(
        predicted="item by item",
        measured=f"worst of {len(ratio)} {far - 1:+.2%}",
        parts=[agreement("bytes a layer keeps over the formula, worst", far, 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "checkpoint each operation",
    "a checkpoint around each operation saves most memory",
    RECOMPUTE,
    "section 5.1",
    **SEEN,
    as_claimed=times(0.5, metric=KEPT, implementation="each operation", **RAN),
    compared=False,
)
def checkpoint_each_operation(frame: pandas.DataFrame) -> Finding:
    """A checkpoint around each operation against none at all (checkpoint-granularity)."""
    where = {"metric": KEPT, "source": "measured", "mode": "new"}
    finest, none = (one(frame, implementation=name, **where) for name in ("each operation", "none"))
    return Finding(
        predicted="three N² maps of inputs are kept instead of two and a mask",
        measured=f"{finest / none:.2f}x the bytes of no checkpoint",
        parts=[less("bytes a layer keeps over those without a checkpoint", finest / none, Evidence.OTHER, ".2f")],
    )


@claim(
    "K14, F6",
    "reentrant checkpoints keep intermediate results; non-reentrant ones keep none, and need O(1) "
    "instead of O(N) memory",
    CODE,
    "section 1",
    **SEEN,
    as_claimed=every(
        times(0.1, metric=KEPT, implementation="each block", mode="new", **RAN),
        times(0.2, metric=KEPT, implementation="each block", mode="reentrant", **RAN),
    ),
    compared=False,
)
def k14(frame: pandas.DataFrame) -> Finding:
    """The notes on the two modes: O(N) to O(1) without reentry, less saving with it."""
    where = {"metric": KEPT, "implementation": "each block"}
    new, old = (one(frame, source="measured", mode=mode, **where) for mode in ("new", "reentrant"))
    model = one(frame, source="predicted", mode="new", **where)
    half = "half of its input is not none"
    return Finding(
        predicted=f"{model:,.0f} B a block in both modes: its input, O(N) in layers",
        measured=f"{new:,.0f} and {old:,.0f} B a block",
        parts=[
            Part(
                "bytes a block, non-reentrant, over the block's input",
                new / model,
                Evidence.OTHER,
                high=SHARE.least,
                why=half,
                form=".2f",
                kind=SHARE,
            ),
            Part(
                "bytes a block, reentrant over non-reentrant",
                old / new,
                Evidence.OTHER,
                low=MEMORY.factor or 1,
                why="more than an allocator's own",
                form=".2f",
                kind=MEMORY,
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
    overturn=(Scale({"metric": KEPT, "implementation": ("none", "selective")}),),
)
def korthikanti_eq_1(frame: pandas.DataFrame) -> Finding:
    """sbh(34 + 5as/h) and 34 sbh (checkpoint-layer-bytes, every length)."""
    rows = pick(frame, metric=KEPT, implementation=["none", "selective"])
    ratio = against_sums(rows, ["implementation", "seqlen_q"])
    return Finding(
        predicted="item by item",
        measured=f"worst of {len(ratio)} {worst(ratio) - 1:+.2%} (PyTorch's hooks)",
        published="sbh(34 + 5as/h), 34 sbh",
        parts=[agreement("saved bytes over the formula, worst", worst(ratio), 1, MEMORY, Evidence.OTHER)],
    )
