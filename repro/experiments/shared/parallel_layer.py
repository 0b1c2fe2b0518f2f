"""Saved activations and collectives of a layer sharded over ranks (Korthikanti 2022)."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.model_states import ring_sent_bytes
from analysis.parallel_activations import LayerShape, layer_collectives, saved_bytes
from repro.experiments import Cell, Context, Row, row

NAME = "several-ranks"
PART = "parallel-layer"
RANKS = (2, 4)
SEQLEN, BATCH, HIDDEN, HEADS = 512, 1, 768, 12  # repro.distributed.measure.LAYER: GPT-2 small
SHAPE = LayerShape(SEQLEN, BATCH, HIDDEN, HEADS)
FORMS = ("tensor", "tensor+selective", "sequence", "sequence+selective")


def cells() -> list[Cell]:
    """Tensor and sequence parallelism, with and without selective recomputation."""
    return [
        Cell(
            part=PART,
            implementation=form,
            ranks=ranks,
            seqlen_q=SEQLEN,
            batch=BATCH,
            heads=HEADS,
            hidden=HIDDEN,
            dtype="bf16",
        )
        for ranks in RANKS
        for form in FORMS
    ]


def predict(cell: Cell) -> Iterator[Row]:
    """Table 2's bytes with the norms' statistics, and the bytes of both passes' collectives."""
    ranks, form = int(cell["ranks"]), str(cell["implementation"])
    sequence = form.startswith("sequence")
    recompute = "selective" if form.endswith("selective") else "none"
    saved = saved_bytes(SHAPE, ranks=ranks, sequence_parallel=sequence, recompute=recompute, statistics_itemsize=2)
    rows = [("saved_bytes", "-", float(saved))]
    collectives = layer_collectives(SHAPE, ranks, sequence_parallel=sequence)
    for pass_, moved in collectives.items():
        sent = sum(ring_sent_bytes(kind, nbytes, ranks) for kind, nbytes in moved.items())
        rows.append(("sent_bytes", pass_, sent))
    for metric, pass_, value in rows:
        yield row(metric, value, pass_=pass_)


def measure(cell: Cell, context: Context) -> list[Row]:
    """Live bytes after the forward and counted collectives, on the rank with most."""
    from repro.distributed.launch import records_of

    rows = records_of(NAME, PART, int(cell["ranks"]), {"implementation": cell["implementation"]})
    return [found | {"tool": "live storages and collectives counted"} for found in rows]
