"""A transformer layer on several ranks: saved bytes (Korthikanti's Table 2), and ring attention."""

import matplotlib.pyplot as plt
import pandas

from analysis.parallel_activations import saved_bytes
from analysis.ring import causal_pairs, ring_bytes
from analysis.shapes import AttentionShape
from figures.common import FILLED, Drawing, devices, key, label_ends, log_axis, note, pick, say
from repro.experiments.shared import parallel_layer as _parallel_layer
from repro.experiments.shared import ring_attention as _ring_attention

EXPERIMENTS = ("several-ranks",)
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
        curve = [float(saved_bytes(shape, ranks=r, statistics_itemsize=2, **options)) / unit for r in TENSOR_RANKS]
        left.plot(TENSOR_RANKS, curve, color=colour, linewidth=1.5)
        measured = pick(rows, implementation=form, source="measured")
        left.plot(measured["ranks"], measured["value"] / unit, marker="o", color=colour, **FILLED)
        ends.append((TENSOR_RANKS[-1], curve[-1], name, colour))
    log_axis(left, "x", TENSOR_RANKS, [str(r) for r in TENSOR_RANKS], base=2)
    left.set_xlim(0.9, 11)
    left.set_ylim(0)
    left.set(xlabel="tensor-parallel ranks t", ylabel="saved bytes a layer / sbh")
    left.set_title("saved activations, Table 2")
    label_ends(left, ends)
    key(left, "gloo ranks", published=False, loc="upper right")

    ring = pick(frame, part=_ring_attention.PART, metric="sent_bytes", implementation="contiguous", causal=False)
    for pass_, colour in (("forward", "#0072B2"), ("backward", "#D55E00")):
        curve = [_ring_bytes(r, pass_) / 1e3 for r in RANKS]
        middle.plot(RANKS, curve, color=colour, linewidth=1.5)
        measured = pick(ring, pass_=pass_, source="measured")
        middle.plot(measured["ranks"], measured["value"] / 1e3, marker="o", color=colour, **FILLED)
        say(middle, pass_, (RANKS[-1], curve[-1]), (5, 0), color=colour, va="center")
    log_axis(middle, "x", RANKS, [str(r) for r in RANKS], base=2)
    middle.set_xlim(0.9, 16)
    middle.set_ylim(0)
    middle.set(xlabel="ranks P", ylabel="sent by a rank (kB)")
    middle.set_title("ring attention: keys, values, dk, dv")

    for placement, colour in (("contiguous", "#D55E00"), ("zigzag", "#009E73")):
        pairs = [causal_pairs(1024, r, placement) for r in RANKS]
        curve = [max(p) * len(p) / sum(p) for p in pairs]
        right.plot(RANKS, curve, color=colour, linewidth=1.5)
        say(right, placement, (RANKS[-1], curve[-1]), (5, 0), va="center", color=colour)
    log_axis(right, "x", RANKS, [str(r) for r in RANKS], base=2)
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
    shape = AttentionShape(ring.BATCH, ring.HEADS, ring.SEQLEN, ring.SEQLEN, ring.HEAD_DIM, ring.KV_HEADS, "fp32")
    return ring_bytes(shape, ranks, pass_)
