"""Attention over a sequence spread over ranks: bytes sent and error against one rank."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.ring import causal_pairs, ring_bytes
from analysis.shapes import AttentionShape
from repro.experiments import Cell, Context, Row, row

NAME = "several-ranks"
PART = "ring-attention"
RANKS = (2, 4)
BATCH, HEADS, KV_HEADS, SEQLEN, HEAD_DIM = 1, 4, 2, 128, 32  # repro.distributed.measure.RING
CASES = ((False, "contiguous"), (True, "contiguous"), (True, "zigzag"))
BLOCK, MEMORY = 64, "contiguous, a block a rank"  # repro.distributed.measure.ring_memory


def cells() -> list[Cell]:
    """Without a mask, causal, and causal with balanced placement; and a block of rows a rank."""
    cases = [(*case, ranks, SEQLEN) for ranks in RANKS for case in CASES]
    cases += [(False, MEMORY, ranks, BLOCK * ranks) for ranks in RANKS]
    return [
        Cell(
            part=PART,
            implementation=placement,
            causal=causal,
            ranks=ranks,
            batch=BATCH,
            heads=HEADS,
            kv_heads=KV_HEADS,
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            head_dim=HEAD_DIM,
            dtype="fp32",
        )
        for causal, placement, ranks, seqlen in cases
    ]


def predict(cell: Cell) -> Iterator[Row]:
    """Bytes each rank sends a pass; causal work of the busiest rank relative to the mean."""
    if cell["implementation"] == MEMORY:
        return
    ranks = int(cell["ranks"])
    shape = AttentionShape(BATCH, HEADS, SEQLEN, SEQLEN, HEAD_DIM, KV_HEADS, "fp32")

    for pass_ in ("forward", "backward"):
        sent = ring_bytes(shape, ranks, pass_)
        yield row("sent_bytes", sent, pass_=pass_)
    if cell["causal"]:
        pairs = causal_pairs(SEQLEN, ranks, str(cell["implementation"]))
        worst = max(pairs) * ranks / sum(pairs)
        yield row("imbalance", worst)


def measure(cell: Cell, context: Context) -> list[Row]:
    """Counted sends and largest error against one rank in float64; or the most alive on a rank."""
    from repro.distributed.launch import records_of

    wanted = {"implementation": cell["implementation"]}
    if cell["implementation"] != MEMORY:
        wanted |= {"causal": cell["causal"]}
    rows = records_of(NAME, PART, int(cell["ranks"]), wanted)
    return [found | {"tool": "sends counted"} for found in rows]
