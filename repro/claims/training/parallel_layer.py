"""A transformer layer on several ranks, and ring attention."""

from __future__ import annotations

from typing import Any

import pandas

from analysis.parallel_activations import LayerShape, saved_bytes
from repro.claims import works
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, agreement
from repro.claims.register import Finding, claim
from repro.claims.tolerances import COUNT, HEADLINE, MEMORY
from repro.claims.values import NAN, against_sums, by, formula, off, pick, worst
from repro.claims.works import KORTHIKANTI, RING
from repro.experiments.shared.parallel_layer import PART as LAYER
from repro.experiments.shared.ring_attention import MEMORY as BLOCKS
from repro.experiments.shared.ring_attention import PART as RINGS

KEYS = ["implementation", "ranks", "causal", "pass"]
#: Bytes at the sockets of the ranks, at either end.
ENDS = ["transport_bytes", "transport_received_bytes"]
GLOO = "gloo's reduce-scatter sends twice a ring's bytes"
SEEN: dict[str, Any] = {"experiments": ("several-ranks",), "shown": "parallel_layer", "conditions": works.RANKS}


def at_sockets(frame: pandas.DataFrame, part: str, forms: str = "") -> float:
    """Bytes sent and received at sockets over the formula, the ratio furthest from 1."""
    rows = pick(frame, part=part)
    rows = rows[rows["implementation"].str.startswith(forms)]
    sums = pick(rows, source="predicted", metric="sent_bytes")
    seen = [against_sums(pandas.concat([sums, pick(rows, source="measured", metric=end)]), KEYS) for end in ENDS]
    return worst(pandas.concat(seen))


def at_least(what: str, ratio: float) -> Part:
    """A part that asks a socket whether a collective of gloo moved a ring's bytes, or more."""
    return Part(what, ratio, Evidence.OTHER, low=1 - MEMORY.share, why=GLOO, kind=MEMORY)


def given(frame: pandas.DataFrame, part: str) -> float:
    """Bytes given to collectives, counted as rings would send them, over the formula."""
    return worst(against_sums(pick(frame, part=part, metric="sent_bytes"), KEYS))


def saved(frame: pandas.DataFrame) -> float:
    """Bytes alive after the forward of a layer over the formula, the ratio furthest from 1."""
    return worst(against_sums(pick(frame, part=LAYER, metric="saved_bytes"), KEYS))


@claim(
    "Korthikanti Table 2",
    "bytes a layer saves by parallelism and recomputation",
    KORTHIKANTI,
    "Table 2",
    **SEEN,
    overturn=(Scale({"part": LAYER, "metric": "saved_bytes"}),),
)
def korthikanti_table_2(frame: pandas.DataFrame) -> Finding:
    far = saved(frame)
    return Finding(
        predicted="sbh (10 + 24/t + 5as/ht) to 34 sbh/t",
        measured=off(far),
        published="Table 2",
        parts=[agreement("bytes alive after the forward over the formula, worst", far, 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "Korthikanti collectives",
    "sequence parallelism sends what tensor parallelism does in the forward, and gathers its "
    "inputs once more in the backward",
    KORTHIKANTI,
    "section 4.2.2",
    **SEEN,
    partial=f"at the sockets tensor parallelism alone: {GLOO}, so sequence parallelism is seen there from below",
    overturn=(
        Scale({"part": LAYER, "implementation": ("tensor", "tensor+selective"), "metric": "transport_bytes"}),
        Scale({"part": LAYER, "implementation": ("tensor", "tensor+selective"), "metric": ENDS[1]}),
        Scale({"part": LAYER, "metric": "sent_bytes"}),
    ),
)
def korthikanti_collectives(frame: pandas.DataFrame) -> Finding:
    sent, tensor, sequence = given(frame, LAYER), at_sockets(frame, LAYER, "tensor"), at_sockets(frame, LAYER, "seq")
    return Finding(
        predicted="4 and 4 + 2 passes",
        measured=f"tensors given to collectives, counted as rings would send them, {off(sent)}; sent and received at "
        f"the sockets, headers included, tensor parallel {off(tensor)}, sequence parallel {off(sequence)}",
        published="section 4.2.2",
        parts=[
            agreement("bytes at the sockets over the formula, tensor parallel", tensor, 1, MEMORY, Evidence.OTHER),
            agreement("bytes given to collectives over the formula, worst", sent, 1, COUNT, Evidence.OTHER),
            at_least("bytes at the sockets over the formula, sequence parallel", sequence),
        ],
    )


@claim(
    "Korthikanti 5x",
    "sequence parallelism and selective recomputation save 5x",
    KORTHIKANTI,
    "Fig. 7",
    **SEEN | {"conditions": "the four models are formulas; no bar is printed"},
    overturn=(Scale({"part": LAYER, "metric": "saved_bytes"}),),
)
def korthikanti_5x(frame: pandas.DataFrame) -> Finding:
    models = {"22B": (6144, 64), "175B": (12288, 96), "530B": (20480, 128), "1T": (25600, 160)}
    fivefold = []
    for hidden, heads in models.values():
        shape = LayerShape(2048, 1, hidden, heads)
        less = saved_bytes(shape, ranks=8, sequence_parallel=True, recompute="selective")
        fivefold.append(float(saved_bytes(shape, ranks=8) / less))
    least, far = formula(min(fivefold)), saved(frame)
    return Finding(
        predicted=", ".join(f"{v:.1f}x" for v in fivefold) + f" ({', '.join(models)})",
        measured=f"the formula, on a small layer: {off(far)}",
        published="about 5x",
        parts=[
            agreement("least factor of the four models over 5", least, 5, HEADLINE, Evidence.DERIVED),
            agreement("bytes alive after the forward over the formula, worst", far, 1, MEMORY, Evidence.OTHER),
        ],
    )


@claim(
    "ring attention",
    "exact attention over P ranks; a rank sends K and V P - 1 times",
    RING,
    **SEEN,
    overturn=(
        *(Scale({"part": RINGS, "metric": metric}) for metric in ("sent_bytes", *ENDS)),
        Scale({"part": RINGS, "metric": "max_error"}, 10, only="up"),
    ),
)
def ring_attention(frame: pandas.DataFrame) -> Finding:
    ring, ends = given(frame, RINGS), at_sockets(frame, RINGS)
    error = float(pick(frame, part=RINGS, metric="max_error")["value"].max())
    return Finding(
        predicted="2 (P-1) Nd/P elements forward",
        measured=f"bytes {off(ring)}, sent and received at the sockets {off(ends)}, headers included; "
        f"error {error:.1e} in fp32",
        parts=[
            agreement("bytes at the sockets over the formula, worst", ends, 1, MEMORY, Evidence.OTHER),
            agreement("bytes of sends over the formula, worst", ring, 1, COUNT, Evidence.OTHER),
            Part(
                "largest error against one rank in float64",
                error,
                Evidence.COUNTED,
                high=1e-5,
                why="sums of 128 products of N(0, 1) in fp32, of 6e-8 each",
                form=".1e",
            ),
        ],
    )


@claim(
    "ring attention, memory",
    "memory of a rank does not depend on the length of all",
    RING,
    "section 3",
    **SEEN | {"conditions": f"{works.RANKS}: 64 rows a rank, storages of tensors alive in a step"},
    partial="lengths of 128 and 256 on 2 and 4 ranks; of 4 one block more of K and V is on its way, 32,768 B",
    overturn=(Scale({"implementation": BLOCKS, "metric": "peak_bytes", "ranks": 4}),),
    compared=False,
)
def ring_memory(frame: pandas.DataFrame) -> Finding:
    peaks = by(frame, "ranks", part=RINGS, implementation=BLOCKS, metric="peak_bytes", source="measured")
    two, four = peaks.get(2, NAN), peaks.get(4, NAN)
    return Finding(
        measured=f"{two:,.0f} B on 2 ranks, {four:,.0f} B on 4",
        parts=[agreement("peak of a rank, 4 ranks over 2", four, two, MEMORY, Evidence.OTHER)],
    )
