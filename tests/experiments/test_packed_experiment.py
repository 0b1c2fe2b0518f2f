"""The experiment of packed sequences: what is executed moves what is predicted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import lower_bounds
from analysis.hbm import compulsory_packed
from analysis.packed import Lengths
from analysis.padding import batches, draw, padded_share
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from repro.experiments.bytes import packed_sequences as experiment


def test_the_published_histograms() -> None:
    """Their sums, and what the paper says of them: half of Wikipedia's tokens are padding at 512,
    2.2 times the tokens of SQuAD at 384."""
    wikipedia, squad = (experiment.histogram(name) for name in experiment.LIMITS)
    assert sum(wikipedia.values()) == 16_279_552
    assert max(wikipedia) == 512
    assert max(squad) == 384
    assert padded_share(wikipedia, 512) == pytest.approx(0.5, abs=0.001)
    assert 1 / (1 - padded_share(squad, 384)) == pytest.approx(2.23, abs=0.005)


def test_draws_follow_the_histogram_and_repeat() -> None:
    histogram = {3: 10, 70: 30, 500: 60}
    found = draw(histogram, 20_000, 1)
    assert found == draw(histogram, 20_000, 1) != draw(histogram, 20_000, 2)
    for length, count in histogram.items():
        share = found.count(length) / len(found)
        assert abs(share - count / 100) < 5 * math.sqrt(0.25 / len(found))
    assert [x.queries for x in batches((1, 2, 3, 4), 2)] == [(1, 2), (3, 4)]
    with pytest.raises(ValueError, match="4 sequences do not fill batches of 3"):
        batches((1, 2, 3, 4), 3)
    with pytest.raises(ValueError, match="has no sequences"):
        draw({}, 4, 0)
    with pytest.raises(ValueError, match="length=400 is below the longest sequence's 500"):
        padded_share(histogram, 400)


side = st.integers(0, 300)


@given(st.lists(st.tuples(side, side), min_size=1, max_size=8), st.booleans())
@settings(deadline=None, max_examples=60)
def test_the_bound_of_a_packed_batch_is_below_its_traffic(pairs: list[tuple[int, int]], causal: bool) -> None:
    lengths = Lengths(tuple(q for q, _ in pairs), tuple(k for _, k in pairs))
    if not lengths.total_q or not lengths.total_k:
        return
    shape = lengths.packed_shape(AttentionShape(1, 4, 1, 1, 64, kv_heads=2, causal=causal))
    for pass_ in ("forward", "backward"):
        traffic = predict_traffic("flash", shape, Tile(64, 64), pass_, lengths=lengths)
        found = compulsory_packed("flash", shape, Tile(64, 64), pass_, traffic, lengths=lengths)
        assert traffic.total_bytes >= max(found.read_bytes, found.write_bytes)
        if causal:  # keys and queries that see nothing need not be read
            continue
        bound = lower_bounds.compulsory_packed_bytes(shape, lengths, pass_)
        assert bound <= found.read_bytes + found.write_bytes
        if pass_ == "forward":
            tables = 2 * 4 * (lengths.sequences + 1)
            assert found.read_bytes + found.write_bytes <= bound + tables


def test_one_sequence_has_the_bound_of_the_plain_call() -> None:
    shape, lengths = AttentionShape(1, 4, 70, 90, 64, kv_heads=2), Lengths((70,), (90,))
    read, write = (lower_bounds.compulsory_read_bytes(shape), lower_bounds.compulsory_write_bytes(shape))
    assert lower_bounds.compulsory_packed_bytes(shape, lengths, "forward") == read + write
