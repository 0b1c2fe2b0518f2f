"""Predicted times of the Hopper backward on packed sequences: blocks, clocks, refusals."""

from dataclasses import replace
from fractions import Fraction

import pytest

from analysis.hardware import H200
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from analysis.tile_loop import tile_loop
from kernels.hopper import BackwardForm
from kernels.timing import hopper_packed_backward_time as packed_backward
from kernels.timing.hopper_packed_time import EMPTY
from repro.measuring.lengths import drawn
from repro.prediction import predict

FORMS = packed_backward.forms()


def batch(head_dim: int, causal: bool, lengths: Lengths, **more: int) -> AttentionShape:
    some = AttentionShape(1, 16, 1, 1, head_dim, dtype="fp16", causal=causal, **more)
    return lengths.packed_shape(some)


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_blocks_are_those_of_the_sequences_alone(form: BackwardForm, causal: bool) -> None:
    """Grouped heads, more and fewer keys than queries, and a sequence without either."""
    queries, keys = (300, 17, 0, 1, 129, 640), (300, 200, 70, 1, 0, 77)
    lengths = Lengths(queries, keys)
    shape = batch(form.head_dim, causal, lengths, kv_heads=4)
    walked = packed_backward.rounds(form, shape, lengths)
    numbers = lengths.numbered_tiles(form.tile.block_n, keys=True)
    assert len(walked) == 4 * numbers
    want = []
    for n, m in zip(queries, keys, strict=True):
        tiles = -(-m // form.tile.block_n)
        if n == 0:
            want += [0] * (4 * tiles)
        elif m:
            visits = tile_loop(replace(shape, seqlen_q=n, seqlen_k=m), form.tile)
            want += 4 * [4 * int(x) for x in visits.visits_of_key_tile]
    assert sorted(n for n in walked if n != EMPTY) == sorted(want)


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_clocks_fill_the_card(form: BackwardForm, causal: bool) -> None:
    """Of this source; on as many SMs as blocks the longest block, on one SM the sum of all."""
    lengths = Lengths.equal(drawn("wikipedia", 16))
    shape = batch(form.head_dim, causal, lengths)
    blocks = len(packed_backward.rounds(form, shape, lengths))
    one, few, each = (packed_backward.clocks(form, shape, lengths, sms) for sms in (1, 132, blocks))
    assert each < few < one < 132 * few
    longest = Lengths.equal([max(lengths.keys)])
    alone = packed_backward.clocks(form, batch(form.head_dim, causal, longest), longest, blocks)
    assert each == alone


def test_a_block_of_many_rounds_costs_what_the_plain_one_does() -> None:
    """A round of the packed kernel within a tenth of the plain one's: its loop is the same."""
    from kernels.timing import hopper_time

    for form in FORMS:
        for causal in (False, True):
            row = packed_backward._row(form, causal)
            packed = Fraction(int(row["clocks_16"]) - int(row["clocks_8"]), 8)
            line, _ = hopper_time.line_of(form, causal)
            assert float(packed) == pytest.approx((line(16) - line(8)) / 8, rel=0.1)


def test_refusals_name_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = Lengths.equal([300, 40])
    shape = batch(64, False, lengths)
    ordered = predict("flash-sm90-deterministic", shape, "backward", H200, lengths=lengths)
    assert ordered.unpredicted is not None
    assert "blocks wait" in ordered.unpredicted
    monkeypatch.setattr(packed_backward, "digest_of", lambda *_: "another")
    told = predict("flash-sm90", shape, "backward", H200, lengths=lengths).unpredicted
    assert told is not None
    assert "has changed: python -m kernels.timing.hopper_packed_backward_time" in told
    monkeypatch.setattr(packed_backward, "_recorded", dict)
    told = predict("flash-sm90", shape, "backward", H200, lengths=lengths).unpredicted
    assert told is not None
    assert "no clocks on record" in told
