"""Sequence lengths drawn from published histograms of two datasets.

Krell et al. (2021, "Efficient sequence packing without cross-contamination") published them with
their code: Wikipedia as BERT is trained on it, cut at 512 tokens, and SQuAD 1.1 at 384.
"""

from __future__ import annotations

from functools import cache

from analysis.padding import draw
from repro.measuring.records import load

LIMITS = {"wikipedia": 512, "squad-1.1": 384}
"""Longest sequence of a dataset, in tokens."""
DRAWN, SEED = 1024, 2021


@cache
def histogram(dataset: str) -> dict[int, int]:
    """Length -> sequences, as published."""
    rows = [r for r in load(["packed-sequences"]) if r.source == "published"]
    return {r.seqlen_q: int(r.value) for r in rows if r.implementation == dataset and r.seqlen_q and r.value}


@cache
def drawn(dataset: str, sequences: int) -> tuple[int, ...]:
    """The first of the ``DRAWN`` sequences that are drawn."""
    return draw(histogram(dataset), DRAWN, SEED)[:sequences]
