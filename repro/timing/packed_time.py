"""Where the Hopper kernels pay for packed sequences: predicted times for published lengths.

``python -m repro.timing tables packed`` writes the table of ``docs/pages/packed.md`` for an H200, a
batch of each dataset of ``repro.measuring.lengths``. Both forms are predicted from their machine
code, Hopper's by ``kernels.timing.hopper_packed_time``, the sm_80 form by
``kernels.timing.sm80_time``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tabulate import tabulate

from analysis.hardware import H200
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from kernels.timing import sm80_time
from kernels.timing.sm80_time import PASSES
from repro.measuring.lengths import LIMITS, drawn
from repro.prediction import predict

SEQUENCES, HEADS, DTYPE, HEAD_DIMS = 64, 16, "fp16", (64, 128)


def batch(dataset: str, head_dim: int, causal: bool) -> tuple[AttentionShape, Lengths]:
    """The packed arrays of ``SEQUENCES`` drawn sequences, and their lengths."""
    lengths = Lengths.equal(drawn(dataset, SEQUENCES))
    some = AttentionShape(1, HEADS, 1, 1, head_dim, dtype=DTYPE, causal=causal)
    return lengths.packed_shape(some), lengths


def times() -> Iterator[tuple[str, str, int, bool, float, float]]:
    """Pass, dataset, head dimension, causal, and seconds of the Hopper form and of the sm_80
    form."""
    for pass_, dataset, head_dim, causal in product(PASSES, LIMITS, HEAD_DIMS, (False, True)):
        shape, lengths = batch(dataset, head_dim, causal)
        hopper = predict("flash-sm90", shape, pass_, H200, lengths=lengths).predicted_s
        assert hopper is not None, "their clocks are of another source"
        sm80 = sm80_time.on_h200(shape, pass_, lengths=lengths)
        yield pass_, dataset, head_dim, causal, hopper, sm80


def table() -> str:
    """The page's table."""
    headers = ("pass", "lengths", "head dimension", "mask", "Hopper form", "sm_80 form", "ratio")
    rows = [
        (
            pass_,
            dataset,
            head_dim,
            "causal" if causal else "none",
            f"{1e6 * hopper:.0f} µs",
            f"{1e6 * sm80:.0f} µs",
            f"{sm80 / hopper:.2f}",
        )
        for pass_, dataset, head_dim, causal, hopper, sm80 in times()
    ]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)
