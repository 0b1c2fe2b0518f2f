"""The predicted times that dispatch takes the Hopper kernels for, beside the sm_80 ones'."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from analysis.sums.packed import working_blocks
from analysis.tile_loop import tile_loop
from kernels.launches import AUTO, launches_of
from kernels.timing import followed_warps
from kernels.timing.followed_warps import Kind
from kernels.timing.sm80_time import ON_H200, PASSES, packed_rounds, rounds_of
from repro.timing import hopper_choice, packed_time, peers, tables
from repro.timing.hopper_choice import MARGIN, SEQLENS, UNSETTLED, Case, favoured


@pytest.fixture(autouse=True, scope="module")
def seconds_once() -> Iterator[None]:
    """Predicted once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "seconds", cache(Case.seconds))
        yield


def of_dispatch(case: Case, seqlen: int) -> str:
    return launches_of(
        AUTO,
        case.shape(seqlen),
        case.pass_,
        ON_H200.device,
        softcap="softcap" in case.features,
        alibi="alibi" in case.features,
    ).algorithm


@pytest.mark.parametrize("pass_", PASSES)
def test_dispatch_takes_what_the_model_favours(pass_: str) -> None:
    """Where times are further apart than the model errs; but for the one case left to a card."""
    overruled = set()
    for case in hopper_choice.cases():
        if case.pass_ != pass_:
            continue
        for seqlen in SEQLENS:
            better = favoured(*case.seconds(seqlen))
            if better not in (None, of_dispatch(case, seqlen)):
                overruled.add(case)
    assert overruled == ({UNSETTLED} if pass_ == "forward" else set())


def test_what_is_left_to_a_card_depends_on_the_window() -> None:
    """Narrow windows favour the sm_80 kernels, wide ones Hopper's: no rule without the width."""
    narrow = {favoured(*UNSETTLED.seconds(n)) for n in SEQLENS}
    assert "flash" in narrow
    assert "flash-sm90" not in narrow
    wide = Case(UNSETTLED.pass_, UNSETTLED.head_dim, True, UNSETTLED.features, left=4096)
    assert favoured(*wide.seconds(16384)) == "flash-sm90"


def test_the_page_has_the_table() -> None:
    block = tables.block("choice")
    page = block.path.read_text(encoding="utf-8")
    assert block.put(tables.TABLES["choice"][1](), page) == page, "python -m repro.timing tables choice"


def test_the_margin_is_the_model_s_error_on_this_card() -> None:
    assert round(peers.summary(peers.judged(peers.comparisons())).median, 3) == MARGIN


@pytest.mark.parametrize("kind", list(followed_warps.kinds(ON_H200)), ids=str)
def test_the_followed_block_has_the_rounds_it_stands_for(kind: Kind) -> None:
    """The first block of the small problem: in the forward it is that of the last query tile."""
    for rounds in followed_warps.lengths_of(kind):
        walked = rounds_of(kind.pass_, kind.config.tile, followed_warps._small(kind, rounds))
        assert next(iter(walked)) == rounds


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("pass_", PASSES)
def test_packed_blocks_are_those_with_rows(pass_: str, causal: bool) -> None:
    shape, lengths = packed_time.batch("squad-1.1", 64, causal)
    tile = Kind(ON_H200, pass_, 64, causal, packed=True).config.tile
    walked = list(packed_rounds(pass_, tile, shape, lengths))
    if pass_ == "forward":
        assert len(walked) == working_blocks(lengths, shape, tile, keys_outside=False)
    visited = sum(
        each.batch * each.heads * int(tile_loop(each, tile).visits_of_query_tile.sum())
        for each in lengths.shapes(shape)
    )
    assert sum(walked) == visited


def test_packed_tiles_without_counterpart_walk_nothing() -> None:
    """Queries without keys are a block each, of 0 rounds; a sequence without either is none."""
    lengths = Lengths((130, 0, 64), (0, 0, 64))
    shape = lengths.packed_shape(AttentionShape(1, 2, 1, 1, 64, dtype="fp16"))
    tile = Kind(ON_H200, "forward", 64, False, packed=True).config.tile
    walked = list(packed_rounds("forward", tile, shape, lengths))
    assert walked == [0] * (2 * -(-130 // tile.block_m)) + [1, 1]
