"""A transformer layer on several ranks: saved bytes (Korthikanti's Table 2), and ring attention."""

import matplotlib.pyplot as plt
import pandas

from analysis.parallel_activations import LayerShape, saved_bytes
from analysis.ring import causal_pairs, ring_bytes
from analysis.shapes import AttentionShape
from figures.common import FILLED, Drawing, devices, key, label_ends, note, pick, worst
from repro.claims import NOT_MEASURED, Claim, Evidence, Part, agreement, claim
from repro.experiments.shared import parallel_layer as _parallel_layer
from repro.experiments.shared import ring_attention as _ring_attention

EXPERIMENTS = ("several-ranks",)
#: What a socket shows of a collective that is no ring in this library.
GLOO = "gloo's reduce-scatter sends twice a ring's bytes"
FORMS = {
    "tensor": ("tensor parallel", "#D55E00"),
    "tensor+selective": ("tensor + selective", "#E69F00"),
    "sequence": ("+ sequence parallel", "#0072B2"),
    "sequence+selective": ("+ sequence + selective", "#009E73"),
}
RANKS = (1, 2, 4, 8)
TENSOR_RANKS = (1, 2, 4)  # they must divide the layer's heads and its sequence


def draw(frame: pandas.DataFrame) -> Drawing:
    """Saved bytes, ring bytes, causal balance."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.2), layout="constrained")
    shape = _parallel_layer.SHAPE
    unit = shape.seqlen * shape.batch * shape.hidden
    rows = pick(frame, part=_parallel_layer.PART, metric="saved_bytes")
    ends = []
    for form, (name, colour) in FORMS.items():
        options = {
            "sequence_parallel": form.startswith("sequence"),
            "recompute": "selective" if form.endswith("selective") else "none",
        }
        curve = [
            float(saved_bytes(shape, ranks=r, statistics_itemsize=2, **options)) / unit
            for r in TENSOR_RANKS
        ]
        left.plot(TENSOR_RANKS, curve, color=colour, linewidth=1.5)
        measured = pick(rows, implementation=form, source="measured")
        left.plot(measured["ranks"], measured["value"] / unit, marker="o", color=colour, **FILLED)
        ends.append((TENSOR_RANKS[-1], curve[-1], name, colour))
    left.set_xscale("log", base=2)
    left.set_xticks(TENSOR_RANKS, [str(r) for r in TENSOR_RANKS])
    left.minorticks_off()
    left.set_xlim(0.9, 11)
    left.set_ylim(0)
    left.set(xlabel="tensor-parallel ranks t", ylabel="saved bytes a layer / sbh")
    left.set_title("saved activations, Table 2")
    label_ends(left, ends)
    key(left, "gloo ranks", published=False, loc="upper right")

    ring = pick(frame, part=_ring_attention.PART, metric="sent_bytes", implementation="contiguous",
                causal=False)  # fmt: skip
    for pass_, colour in (("forward", "#0072B2"), ("backward", "#D55E00")):
        curve = [_ring_bytes(r, pass_) / 1e3 for r in RANKS]
        middle.plot(RANKS, curve, color=colour, linewidth=1.5)
        measured = pick(ring, pass_=pass_, source="measured")
        middle.plot(measured["ranks"], measured["value"] / 1e3, marker="o", color=colour, **FILLED)
        middle.annotate(pass_, (RANKS[-1], curve[-1]), xytext=(5, 0), textcoords="offset points",
                        color=colour, va="center", fontsize=8)  # fmt: skip
    middle.set_xscale("log", base=2)
    middle.set_xticks(RANKS, [str(r) for r in RANKS])
    middle.minorticks_off()
    middle.set_xlim(0.9, 16)
    middle.set_ylim(0)
    middle.set(xlabel="ranks P", ylabel="sent by a rank (kB)")
    middle.set_title("ring attention: keys, values, dk, dv")

    for placement, colour in (("contiguous", "#D55E00"), ("zigzag", "#009E73")):
        pairs = [causal_pairs(1024, r, placement) for r in RANKS]
        curve = [max(p) * len(p) / sum(p) for p in pairs]
        right.plot(RANKS, curve, color=colour, linewidth=1.5)
        right.annotate(placement, (RANKS[-1], curve[-1]), xytext=(5, 0), va="center",
                       textcoords="offset points", color=colour, fontsize=8)  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_xticks(RANKS, [str(r) for r in RANKS])
    right.minorticks_off()
    right.set_xlim(0.9, 18)
    right.set_ylim(0.9, 2.1)
    right.set(xlabel="ranks P", ylabel="busiest rank / mean")
    right.set_title("causal work by placement")
    note(
        figure,
        f"Left: s = {shape.seqlen}, b = {shape.batch}, h = {shape.hidden}, a = {shape.heads}, bf16 "
        f"(5as/h = {5 * shape.heads * shape.seqlen // shape.hidden}). Middle: "
        f"{_ring_attention.HEADS} heads, {_ring_attention.KV_HEADS} key heads, N = "
        f"{_ring_attention.SEQLEN}, fp32. Points: {devices(frame)}.",
    )
    table = pick(frame, part=[_parallel_layer.PART, _ring_attention.PART])
    columns = ["part", "implementation", "ranks", "causal", "pass", "metric", "source", "value"]
    return Drawing(figure, table.reindex(columns=[*columns, "unit"]))


def _ring_bytes(ranks: int, pass_: str) -> int:
    ring = _ring_attention
    shape = AttentionShape(
        ring.BATCH, ring.HEADS, ring.SEQLEN, ring.SEQLEN, ring.HEAD_DIM, ring.KV_HEADS, "fp32"
    )
    return ring_bytes(shape, ranks, pass_)


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


def verdicts(frame: pandas.DataFrame) -> list[Claim]:
    """Korthikanti's Table 2 and 5x, ring traffic and exactness."""
    saved = worst_deviation(frame, part=_parallel_layer.PART, metric="saved_bytes")
    sent = worst_deviation(frame, part=_parallel_layer.PART, metric="sent_bytes")
    ring = worst_deviation(frame, part=_ring_attention.PART, metric="sent_bytes")
    errors = pick(frame, part=_ring_attention.PART, metric="max_error")["value"].dropna()
    layer, ring_sent = _parallel_layer.PART, at_sockets(frame, _ring_attention.PART)
    tensor, sequence = (at_sockets(frame, layer, form) for form in ("tensor", "sequence"))
    models = {"22B": (6144, 64), "175B": (12288, 96), "530B": (20480, 128), "1T": (25600, 160)}
    fivefold = []
    for hidden, heads in models.values():
        shape = LayerShape(2048, 1, hidden, heads)
        less = saved_bytes(shape, ranks=8, sequence_parallel=True, recompute="selective")
        fivefold.append(float(saved_bytes(shape, ranks=8) / less))

    def shown(value: float) -> str:
        return f"worst {value - 1:+.2%}" if value == value else NOT_MEASURED

    error = float(errors.max()) if len(errors) else float("nan")
    return [
        claim(
            "Korthikanti Table 2",
            predicted="sbh (10 + 24/t + 5as/ht) to 34 sbh/t",
            measured=shown(saved),
            published="Table 2",
            parts=[agreement("bytes alive after the forward over the formula, worst", saved, 1,
                             0.005, Evidence.OTHER)],
        ),
        claim(
            "Korthikanti collectives",
            predicted="4 and 4 + 2 passes",
            measured=f"tensors given to collectives {shown(sent)}; at the sockets, headers "
            f"included, tensor parallel {shown(tensor)}, sequence parallel {shown(sequence)}",
            published="section 4.2.2",
            parts=[
                agreement("tensors given to collectives, sent as rings, over the formula, worst",
                          sent, 1, 0.005, Evidence.OTHER),
                agreement("bytes at the sockets over the formula, tensor parallel, worst", tensor,
                          1, 0.05, Evidence.OTHER),
                agreement("bytes at the sockets over the formula, sequence parallel, worst",
                          sequence, 1, 0.05, Evidence.OTHER, limits=1.6, why=GLOO),
            ],
        ),
        claim(
            "Korthikanti 5x",
            predicted=", ".join(f"{v:.1f}x" for v in fivefold) + f" ({', '.join(models)})",
            measured=f"the formula, on a small layer: {shown(saved)}",
            published="about 5x",
            parts=[
                Part(what="least factor of the four models", value=min(fivefold), low=4.5,
                     evidence=Evidence.DERIVED, form=".2f"),
                agreement("bytes alive after the forward over the formula, worst", saved, 1, 0.005,
                          Evidence.OTHER),
            ],
        ),
        claim(
            "ring attention",
            predicted="2 (P-1) Nd/P elements forward",
            measured=f"bytes {shown(ring)}, at the sockets {shown(ring_sent)}, headers included; "
            f"error {error:.1e} in fp32" if error == error else NOT_MEASURED,
            parts=[
                agreement("bytes at the sockets over the formula, worst", ring_sent, 1, 0.05,
                          Evidence.OTHER),
                agreement("bytes of sends over the formula, worst", ring, 1, 0.0, Evidence.OTHER),
                Part(what="largest error against one rank in float64", value=error, high=1e-5,
                     evidence=Evidence.COUNTED, form=".1e"),
            ],
        ),
    ]  # fmt: skip
