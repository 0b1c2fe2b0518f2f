"""Attention over a sequence spread over ranks: bytes sent and error against one rank."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.ring import causal_pairs, ring_bytes
from analysis.shapes import AttentionShape
from repro.experiments import Cell, Context, record
from repro.measuring.records import Record

NAME = "several-ranks"
PART = "ring-attention"
RANKS = (2, 4)
BATCH, HEADS, KV_HEADS, SEQLEN, HEAD_DIM = 1, 4, 2, 128, 32  # repro.distributed.measure.RING
CASES = ((False, "contiguous"), (True, "contiguous"), (True, "zigzag"))
BLOCK, MEMORY = 64, "contiguous, a block a rank"  # repro.distributed.measure.ring_memory


def cells() -> list[Cell]:
    """Without a mask, causal, and causal with balanced placement; and a block of rows a rank."""
    sizes = {"batch": BATCH, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "fp32"}
    blocks = [
        Cell(
            part=PART,
            implementation=MEMORY,
            causal=False,
            ranks=ranks,
            seqlen_q=BLOCK * ranks,
            seqlen_k=BLOCK * ranks,
            **sizes,
        )
        for ranks in RANKS
    ]
    return blocks + [
        Cell(part=PART, implementation=placement, causal=causal, ranks=ranks, seqlen_q=SEQLEN, seqlen_k=SEQLEN, **sizes)
        for ranks in RANKS
        for causal, placement in CASES
    ]


def predict(cell: Cell) -> Iterator[Record]:
    """Bytes each rank sends a pass; causal work of the busiest rank relative to the mean."""
    if cell["implementation"] == MEMORY:
        return
    ranks = int(cell["ranks"])
    shape = AttentionShape(BATCH, HEADS, SEQLEN, SEQLEN, HEAD_DIM, KV_HEADS, "fp32")
    common = {"experiment": NAME, "source": "predicted"}
    for pass_ in ("forward", "backward"):
        sent = ring_bytes(shape, ranks, pass_)
        yield record(cell, metric="sent_bytes", value=sent, unit="B", pass_=pass_, **common)
    if cell["causal"]:
        pairs = causal_pairs(SEQLEN, ranks, str(cell["implementation"]))
        worst = max(pairs) * ranks / sum(pairs)
        yield record(cell, metric="imbalance", value=worst, unit="1", **common)


def measure(cell: Cell, context: Context) -> list[Record]:
    """Counted sends and largest error against one rank in float64; or the most alive on a rank."""
    from repro.distributed.launch import records_of

    wanted = {"implementation": cell["implementation"]}
    if cell["implementation"] != MEMORY:
        wanted |= {"causal": cell["causal"]}
    rows = records_of(NAME, PART, int(cell["ranks"]), wanted)
    return [record(cell, source="measured", tool="sends counted", **(row | {"experiment": NAME})) for row in rows]
