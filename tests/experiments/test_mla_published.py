"""Times of others on DeepSeek's latent: what is on record agrees with itself and with the bound."""

from __future__ import annotations

import pytest

from repro.experiments.papers import mla_published as experiment
from repro.measuring.records import load

#: GB/s as the test printed them beside the times, by its own count of bytes.
PRINTED = {(16, 1): 2826, (16, 2): 2812, (32, 1): 2813, (32, 2): 2788, (64, 1): 2789}


def test_bytes_over_the_posted_times_are_the_bandwidths_printed_beside_them() -> None:
    """Within the rounding of a time to a microsecond and what the lengths drawn there differ by."""
    rows = [r for r in load([experiment.EXPERIMENT.name]) if r.source == "published"]
    assert len(rows) == len(PRINTED) == len(experiment.POSTED)
    for row in rows:
        assert row.value is not None
        assert row.heads is not None
        assert row.seqlen_q is not None
        shape = experiment.shape_of(row.heads, row.seqlen_q)
        rate = shape.compulsory_bytes / row.value / 1e3
        assert rate == pytest.approx(PRINTED[row.heads, row.seqlen_q], rel=0.01)
