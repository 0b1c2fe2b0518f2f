"""A transformer layer on several ranks, and ring attention."""

from __future__ import annotations

import pandas

from analysis.parallel_activations import LayerShape, saved_bytes
from repro.claims import works
from repro.claims.mutations import Scale
from repro.claims.protocol import Evidence, Part, agreement
from repro.claims.register import NOT_MEASURED, Finding, claim
from repro.claims.tolerances import COUNT, MEMORY
from repro.claims.values import pick, worst
from repro.claims.works import KORTHIKANTI, RING
from repro.experiments.shared import parallel_layer as _parallel_layer
from repro.experiments.shared import ring_attention as _ring_attention

#: What a socket shows of a collective that is no ring in this library.
GLOO = "gloo's reduce-scatter sends twice a ring's bytes"


def worst_deviation(frame: pandas.DataFrame, **wanted: object) -> float:
    """Measured over predicted, the ratio furthest from 1; NaN without measurements."""
    keys = ["implementation", "ranks", "causal", "pass", "metric"]
    rows = pick(frame, **wanted).fillna({"causal": False})
    table = rows.pivot_table(index=keys, columns="source", values="value")
    if "measured" not in table or table["measured"].isna().any():
        return float("nan")
    ratio = table["measured"] / table["predicted"]
    return float(ratio.iloc[(ratio - 1).abs().argmax()])


def at_sockets(frame: pandas.DataFrame, part: str, forms: str = "") -> float:
    """Bytes that left through sockets over the formula, the ratio furthest from 1; NaN without."""
    keys = ["implementation", "ranks", "causal", "pass"]
    rows = pick(frame, part=part, metric=["sent_bytes", "transport_bytes"])
    rows = rows[rows["implementation"].str.startswith(forms)].fillna({"causal": False})
    seen = pick(rows, source="measured", metric="transport_bytes").set_index(keys)["value"]
    formula = pick(rows, source="predicted", metric="sent_bytes").set_index(keys)["value"]
    return worst(seen / formula.reindex(seen.index))


def shown(value: float) -> str:
    """A ratio that should be 1, in words."""
    return f"worst {value - 1:+.2%}" if value == value else NOT_MEASURED


@claim(
    "Korthikanti Table 2",
    "bytes a layer saves by parallelism and recomputation",
    KORTHIKANTI,
    "Table 2",
    experiments=("several-ranks",),
    shown="parallel_layer",
    conditions=works.RANKS,
    overturn=(Scale(),),
)
def korthikanti_table_2(frame: pandas.DataFrame) -> Finding:
    saved = worst_deviation(frame, part=_parallel_layer.PART, metric="saved_bytes")

    return Finding(
        predicted="sbh (10 + 24/t + 5as/ht) to 34 sbh/t",
        measured=shown(saved),
        published="Table 2",
        parts=[agreement("bytes alive after the forward over the formula, worst", saved, 1, MEMORY, Evidence.OTHER)],
    )


@claim(
    "Korthikanti collectives",
    "sequence parallelism sends what tensor parallelism does in the forward, and gathers its "
    "inputs once more in the backward",
    KORTHIKANTI,
    "section 4.2.2",
    experiments=("several-ranks",),
    shown="parallel_layer",
    conditions=works.RANKS,
    overturn=(Scale({"metric": "transport_bytes"}),),
)
def korthikanti_collectives(frame: pandas.DataFrame) -> Finding:
    sent = worst_deviation(frame, part=_parallel_layer.PART, metric="sent_bytes")
    layer = _parallel_layer.PART
    tensor, sequence = (at_sockets(frame, layer, form) for form in ("tensor", "sequence"))

    return Finding(
        predicted="4 and 4 + 2 passes",
        measured=f"tensors given to collectives, counted as rings would send them, {shown(sent)}; "
        f"at the sockets, headers included, tensor parallel {shown(tensor)}, sequence parallel "
        f"{shown(sequence)}",
        published="section 4.2.2",
        parts=[
            agreement(
                "bytes at the sockets over the formula, tensor parallel, worst", tensor, 1, MEMORY, Evidence.OTHER
            ),
            agreement(
                "bytes at the sockets over the formula, sequence parallel, worst",
                sequence,
                1,
                MEMORY,
                Evidence.OTHER,
                limits=1.6,
                why=GLOO,
            ),
        ],
    )


@claim(
    "Korthikanti 5x",
    "sequence parallelism and selective recomputation save 5x",
    KORTHIKANTI,
    "Fig. 7",
    experiments=("several-ranks",),
    shown="parallel_layer",
    conditions="the four models are formulas; no bar is printed",
    overturn=(Scale(),),
)
def korthikanti_5x(frame: pandas.DataFrame) -> Finding:
    saved = worst_deviation(frame, part=_parallel_layer.PART, metric="saved_bytes")
    models = {"22B": (6144, 64), "175B": (12288, 96), "530B": (20480, 128), "1T": (25600, 160)}
    fivefold = []
    for hidden, heads in models.values():
        shape = LayerShape(2048, 1, hidden, heads)
        less = saved_bytes(shape, ranks=8, sequence_parallel=True, recompute="selective")
        fivefold.append(float(saved_bytes(shape, ranks=8) / less))

    return Finding(
        predicted=", ".join(f"{v:.1f}x" for v in fivefold) + f" ({', '.join(models)})",
        measured=f"the formula, on a small layer: {shown(saved)}",
        published="about 5x",
        parts=[
            Part(
                what="least factor of the four models",
                value=min(fivefold),
                low=4.5,
                evidence=Evidence.DERIVED,
                form=".2f",
            ),
            agreement("bytes alive after the forward over the formula, worst", saved, 1, MEMORY, Evidence.OTHER),
        ],
    )


@claim(
    "ring attention",
    "exact attention over P ranks; a rank sends K and V P - 1 times",
    RING,
    experiments=("several-ranks",),
    shown="parallel_layer",
    conditions=works.RANKS,
    overturn=(
        Scale({"metric": "sent_bytes"}),
        Scale({"metric": "transport_bytes"}),
        Scale({"metric": "max_error"}, 10, only="up"),
    ),
)
def ring_attention(frame: pandas.DataFrame) -> Finding:
    ring = worst_deviation(frame, part=_ring_attention.PART, metric="sent_bytes")
    errors = pick(frame, part=_ring_attention.PART, metric="max_error")["value"].dropna()
    ring_sent = at_sockets(frame, _ring_attention.PART)

    error = float(errors.max()) if len(errors) else float("nan")
    return Finding(
        predicted="2 (P-1) Nd/P elements forward",
        measured=f"bytes {shown(ring)}, at the sockets {shown(ring_sent)}, headers included; error {error:.1e} in fp32"
        if error == error
        else NOT_MEASURED,
        parts=[
            agreement("bytes at the sockets over the formula, worst", ring_sent, 1, MEMORY, Evidence.OTHER),
            agreement("bytes of sends over the formula, worst", ring, 1, COUNT, Evidence.OTHER),
            Part(
                what="largest error against one rank in float64",
                value=error,
                high=1e-5,
                evidence=Evidence.COUNTED,
                form=".1e",
            ),
        ],
    )
