"""Predicted times of the Hopper kernels on packed sequences: numbers, clocks, refusals, page."""

from dataclasses import replace

import pytest

from analysis.hardware import H200
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from analysis.tile_loop import tile_loop
from kernels.hopper import BackwardForm
from kernels.timing import hopper_packed_time, records
from kernels.timing.followed_blocks import Form
from kernels.timing.records import EMPTY
from repro.measuring.lengths import drawn
from repro.prediction import NoTime, predict
from repro.timing import packed_time

each_form = pytest.mark.parametrize(
    "form", hopper_packed_time.forms(), ids=lambda f: f"{hopper_packed_time.pass_of(f)} {f.name}"
)
each_mask = pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])


def batch(form: Form, causal: bool, lengths: Lengths, **more: int) -> AttentionShape:
    some = AttentionShape(1, 16, 1, 1, form.head_dim, dtype="fp16", causal=causal, **more)
    return lengths.packed_shape(some)


@each_mask
@each_form
def test_numbers_are_those_of_the_tiles_of_each_sequence(form: Form, causal: bool) -> None:
    """Grouped heads, more and fewer keys than queries, and sequences without either."""
    queries, keys = (300, 17, 0, 1, 129, 640), (300, 200, 70, 1, 0, 77)
    lengths = Lengths(queries, keys)
    shape = batch(form, causal, lengths, kv_heads=4)
    backward = isinstance(form, BackwardForm)
    step = form.tile.block_n if backward else form.tile.block_m
    heads, group = (4, 4) if backward else (16, 1)
    want = []
    for n, m in zip(queries, keys, strict=True):
        own, other = (m, n) if backward else (n, m)
        if other == 0:
            want += [0] * (heads * -(-own // step))
        elif own:
            visits = tile_loop(replace(shape, seqlen_q=n, seqlen_k=m), form.tile)
            of_head = visits.visits_of_key_tile if backward else visits.visits_of_query_tile
            want += heads * [group * int(x) for x in of_head]
    walked = hopper_packed_time.rounds(form, shape, lengths)
    assert len(walked) == heads * lengths.numbered_tiles(step, keys=backward)
    assert sorted(n for n in walked if n != EMPTY) == sorted(want)


@each_mask
@each_form
def test_clocks_fill_the_card(form: Form, causal: bool) -> None:
    """Of this source. On as many SMs as numbers, the longest tile; on one, the sum of all."""
    lengths = Lengths.equal(drawn("wikipedia", 16))
    shape = batch(form, causal, lengths)
    numbers = len(hopper_packed_time.rounds(form, shape, lengths))
    one, few, each = (hopper_packed_time.clocks(form, shape, lengths, sms) for sms in (1, 132, numbers))
    assert each < few < one < 132 * few
    longest = Lengths.equal([max(lengths.queries)])
    alone = hopper_packed_time.clocks(form, batch(form, causal, longest), longest, numbers)
    assert each == alone


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_time_that_is_not_there_says_why(pass_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = Lengths.equal([300, 40])
    shape = lengths.packed_shape(AttentionShape(1, 16, 1, 1, 64, dtype="fp16"))

    def told(algorithm: str) -> str:
        found = predict(algorithm, shape, pass_, H200, lengths=lengths).predicted
        assert isinstance(found, NoTime)
        return found.reason

    monkeypatch.setattr(hopper_packed_time, "digest_of", lambda *_: "another")
    assert "has changed: python -m kernels.timing hopper-packed" in told("flash-sm90")
    monkeypatch.setattr(records, "find", lambda *_, **__: None)
    assert f"no clocks on record for the packed {pass_}" in told("flash-sm90")
    if pass_ == "backward":
        assert "blocks wait" in told("flash-sm90-deterministic")


def test_it_pays_for_real_lengths() -> None:
    """For either pass, dataset, head dimension and mask, by the model of time on both forms'
    code."""
    times = list(packed_time.times())
    assert len(times) == 16
    for pass_, dataset, head_dim, causal, hopper_s, sm80_s in times:
        assert hopper_s < sm80_s, (pass_, dataset, head_dim, causal)
