"""The simulated L2: against a plain one in Python, its closed forms, and what GB10 was measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.hardware import GPUS, H200
from analysis.hbm import compulsory_hbm, fits, predict_hbm
from analysis.l2 import L2, Launch, Pace, available, replay, simulate
from analysis.l2.attention import key_tiles_outside, launch_order, one_block_a_head, query_tiles_outside
from analysis.l2.closed_forms import Waves, lone_sms, lone_tail_bytes
from analysis.l2.kernels import launch_of
from analysis.l2.launch import ALWAYS
from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from analysis.traffic import predict_traffic
from tests.support.l2_support import plainly

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler here")
GB10 = GPUS["GB10"]
LONG_TILE = Tile(128, 64)


def any_launch(kind: str, shape: AttentionShape, tile: Tile, masked: bool) -> Launch:
    mask = {}
    if masked:
        loop = tile_loop(shape, tile)
        size = (shape.batch, shape.heads, loop.query_tiles, loop.key_tiles)
        mask = {"block_mask": np.random.default_rng(0).random(size) < 0.6}
    if kind == "forward":
        return query_tiles_outside(shape, tile, order="sawtooth", wave=4, heads_per_group=2, **mask)
    if kind == "one block a head":
        state = {"read": ALWAYS, "write": ALWAYS}
        return one_block_a_head(shape, tile, {"q": {"read": ALWAYS}, "out": state, "l": state}, **mask)
    if kind == "unfinished":
        return launch_of("flash1_forward", RELEASED, shape, tile, wave=0, form="released", **mask)
    order = {"order": "sawtooth", "wave": 3, "last_first": True} if kind == "atomic" else {}
    return key_tiles_outside(shape, tile, accumulate={"none": None}.get(kind, kind), **order, **mask)


RELEASED = (
    ("k", "read"),
    ("v", "read"),
    ("q", "read"),
    ("out_tmp", "read"),
    ("out_tmp", "write"),
    ("lse", "read"),
    ("lse", "write"),
    ("out", "write"),
)
KINDS = ("forward", "one block a head", "unfinished", "atomic", "partial", "none")


@pytest.mark.parametrize("kind", KINDS)
@given(
    seqlens=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    group=st.sampled_from([1, 2]),
    causal=st.booleans(),
    masked=st.booleans(),
    partitions=st.sampled_from([1, 2]),
    sets=st.sampled_from([1, 3, 8]),
    ways=st.sampled_from([1, 4, 16]),
    sms=st.integers(1, 4),
    slots=st.integers(1, 3),
    pace=st.sampled_from([Pace(), Pace(lone_speedup=1.5), Pace(spread=0.3, seed=4)]),
)
@settings(deadline=None, max_examples=15)
def test_it_counts_what_a_plain_cache_counts(
    kind, seqlens, group, causal, masked, partitions, sets, ways, sms, slots, pace
) -> None:
    kv_heads = 4 if kind in ("one block a head", "unfinished") else 4 // group
    shape = AttentionShape(1, 4, *seqlens, 16, kv_heads=kv_heads, causal=causal)
    launch = any_launch(kind, shape, Tile(16, 32), masked)
    l2 = L2(partitions, sets, ways)
    found = simulate(launch, l2, sms, slots, pace, sampled_sets=sets, burst=1)
    assert found == plainly(launch, l2, sms, slots, pace)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_ask_for_the_bytes_of_the_sums(kind: str, causal: bool) -> None:
    """A cache of one line a set and one set keeps nothing: what it fetches and writes is the
    traffic of the tile loop (``analysis.sums``), tensor by tensor."""
    of_2022 = kind in ("one block a head", "unfinished")
    shape = AttentionShape(2, 4, 160, 224, 64, kv_heads=4 if of_2022 else 2, causal=causal)
    tile = Tile(32, 64)
    algorithm, pass_ = {
        "forward": ("flash", "forward"),
        "one block a head": ("flash1-literal", "forward"),
        "unfinished": ("flash1-released", "forward"),
        "atomic": ("flash", "backward"),
        "partial": ("flash-deterministic", "backward"),
        "none": ("flash-split", "backward"),
    }[kind]
    kernels = predict_traffic(algorithm, shape, tile, pass_).kernels
    main = {"forward": "flash_forward", "one block a head": "flash1_forward", "unfinished": "flash1_forward"}.get(
        kind, "flash_backward"
    )
    launch = any_launch(kind, shape, tile, masked=False)
    found = simulate(launch, L2(1, 1, 1), 1, sampled_sets=1, burst=1)
    for tensor, count in found.items():
        entries = kernels[main]
        asked = entries.get((tensor, "read"), 0) + entries.get((tensor, "atomic"), 0)
        sent = entries.get((tensor, "write"), 0) + entries.get((tensor, "atomic"), 0)
        assert (count.fetched, count.written + count.left) == (asked, sent), tensor


# ---- closed forms -------------------------------------------------------------------------------


def test_nothing_moves_twice_where_everything_fits() -> None:
    """The prediction leaves out the simulation there, so the two must agree to the byte."""
    shape = AttentionShape(2, 4, 2048, 2048, 64)
    traffic = predict_traffic("flash", shape, LONG_TILE, "forward")
    assert fits(compulsory_hbm(traffic, shape), "flash_forward", L2.of(H200))
    launch = query_tiles_outside(shape, LONG_TILE)
    for pace in (Pace(), Pace(spread=0.5)):
        found = simulate(launch, L2.of(H200), 132, 2, pace, sampled_sets=L2.of(H200).sets)
        for tensor, count in found.items():
            moved = count.written + count.left if tensor in ("out", "lse") else count.fetched
            assert count.touched == launch.sizes[tensor]
            assert moved == launch.sizes[tensor]


@pytest.mark.parametrize(("heads", "seqlen"), [(1, 131072), (2, 98304), (1, 24576), (4, 8192)])
def test_waves_in_step_are_the_closed_form(heads: int, seqlen: int) -> None:
    """With no block faster than another the simulator gives the wave rule's walks."""
    l2 = L2.of_bytes(24 << 20, 1)
    shape = AttentionShape(1, heads, seqlen, seqlen, 128)
    launch = query_tiles_outside(shape, LONG_TILE)
    k = simulate(launch, l2, 132, 1, Pace(lone_speedup=1))["k"]
    waves = Waves(heads, seqlen // 128, 132)
    rows = waves.rows_from_hbm(lambda first, last: seqlen, seqlen * 512, l2.shared_bytes)
    assert k.fetches == pytest.approx(rows / (heads * seqlen), rel=0.06)


def lone_tail(seqlen: int, speedup: float) -> tuple[float, float]:
    """Walks of K and V beyond one a wave: simulated, and by the closed form."""
    shape = AttentionShape(1, 1, seqlen, seqlen, 128)
    launch = query_tiles_outside(shape, LONG_TILE)
    l2 = L2.of(H200)
    walk = 2 * seqlen * 128 * 2
    waves = -(-seqlen // 128 // 264) if seqlen % 128 == 0 else 0
    fetched = simulate(launch, l2, 132, 2, Pace(lone_speedup=speedup))["k"].fetches
    expected = lone_tail_bytes(walk, l2.shared_bytes, speedup)
    assert expected is not None
    return fetched - waves, expected / walk


@pytest.mark.parametrize(("seqlen", "speedup"), [(262144, 2), (196608, 2), (262144, 1.6)])
def test_blocks_behind_lone_ones_fetch_their_walk_again(seqlen: int, speedup: float) -> None:
    assert lone_sms(seqlen // 128, 132, 2)[0] > 0
    simulated, formula = lone_tail(seqlen, speedup)
    assert simulated == pytest.approx(formula, abs=0.03)


def test_a_grid_of_whole_waves_has_no_lone_tail() -> None:
    """264 k blocks: K and V once a wave. One block more: one walk more, and no gap, since nobody
    follows the lone block. That one finds a little in the partition it does not fill."""
    for waves in (3, 4):
        for more, lone in ((0, 0), (1, 0), (140, 124)):
            blocks = 264 * waves + more
            assert lone_sms(blocks, 132, 2)[0] == lone
            shape = AttentionShape(1, 1, 128 * blocks, 128 * blocks, 128)
            launch = query_tiles_outside(shape, LONG_TILE)
            fetched = simulate(launch, L2.of(H200), 132, 2)["k"].fetches
            walks = waves + (more > 0)
            if lone:
                assert fetched > walks + 0.3
            else:
                assert fetched == pytest.approx(walks, abs=0.06)


def test_the_closed_form_says_where_it_does_not_hold() -> None:
    assert lone_tail_bytes(100, 60, 2) is None
    assert lone_tail_bytes(100, 30, 1) == 0
    assert lone_tail_bytes(100, 30, 2) == 80


# ---- effort -------------------------------------------------------------------------------------


def test_a_sample_of_sets_and_bursts_of_tiles_change_little() -> None:
    shape = AttentionShape(1, 1, 98304, 98304, 128)
    launch = query_tiles_outside(shape, LONG_TILE)
    every = simulate(launch, L2.of(H200), 132, 2, sampled_sets=1024, burst=1)["k"].fetches
    for sets, burst in ((16, 1), (16, 8), (128, 12), (None, None)):
        found = simulate(launch, L2.of(H200), 132, 2, sampled_sets=sets, burst=burst)["k"].fetches
        assert found == pytest.approx(every, rel=0.012), (sets, burst)


def test_256k_tokens_of_four_heads_take_few_steps() -> None:
    """Under 10 seconds on one core is a promise about work: so many block steps, so many lines."""
    shape = AttentionShape(1, 4, 262144, 262144, 128)
    launch = query_tiles_outside(shape, LONG_TILE)
    assert launch.accesses > 8e9
    found = simulate(launch, L2.of(H200), 132, 2)["k"]
    simulated_share = found.touched / launch.sizes["k"]
    assert simulated_share * launch.accesses < 20e6


def test_more_than_48_waves_are_foretold_from_the_first() -> None:
    tile = Tile(64, 64)
    many, few = (AttentionShape(1, heads, 4096, 4096, 128) for heads in (512, 256))
    for pass_ in ("forward", "backward"):
        a, b = (predict_hbm("flash", s, tile, pass_, H200, 1).read_bytes for s in (many, few))
        assert a == pytest.approx(2 * b, rel=0.01)


# ---- who shares ---------------------------------------------------------------------------------


def test_groups_of_heads_share_their_keys() -> None:
    """Eight query heads on one key/value head fetch an eighth of what eight heads fetch."""
    alone = AttentionShape(1, 8, 16384, 16384, 128)
    shared = AttentionShape(1, 8, 16384, 16384, 128, kv_heads=1)
    k_alone, k_shared = (
        predict_hbm("flash", s, LONG_TILE, "forward", H200, 1).reads["flash_forward"]["k"] for s in (alone, shared)
    )
    assert k_shared == shared.key_bytes
    assert k_alone == pytest.approx(alone.key_bytes, rel=0.3)


def test_a_block_mask_leaves_out_its_tiles() -> None:
    shape = AttentionShape(1, 1, 65536, 65536, 128)
    band = abs(np.subtract.outer(np.arange(64), np.arange(64))) <= 2
    mask = {"block_mask": band[None, None], "mask_block": Tile(1024, 1024)}
    sparse = predict_hbm("flash", shape, LONG_TILE, "forward", H200, 1, **mask)
    assert sparse.reads["flash_forward"]["k"] == pytest.approx(shape.key_bytes, rel=0.01)
    dense = predict_hbm("flash", shape, LONG_TILE, "forward", H200, 1)
    assert dense.reads["flash_forward"]["k"] > 3 * shape.key_bytes


def test_launch_order_of_head_groups() -> None:
    head, place = launch_order(3, 2, 2)
    assert head.tolist() == [0, 1, 0, 1, 2, 2]
    assert place.tolist() == [0, 0, 1, 1, 0, 1]


def test_a_recorded_order_is_replayed() -> None:
    """Two SMs that walk one head a whole walk apart share nothing where it does not fit."""
    shape = AttentionShape(1, 1, 32, 4096, 64)
    launch = query_tiles_outside(shape, Tile(16, 16))
    walk = [(step,) for step in (-1, *range(256), -2)]
    together = [(b, b, s) for (s,) in walk for b in (0, 1)]
    apart = [(b, b, s) for b in (0, 1) for (s,) in walk]
    l2 = L2(1, 64, 16)
    assert replay(launch, l2, 2, together)["k"].fetched == shape.key_bytes
    assert replay(launch, l2, 2, apart)["k"].fetched == 2 * shape.key_bytes
    with pytest.raises(ValueError, match="SM 2 is none of the 2"):
        replay(launch, l2, 2, [(2, 0, 0)])
    with pytest.raises(ValueError, match="step 256 is none"):
        replay(launch, l2, 2, [(0, 0, 256)])


# ---- GB10, arXiv 2601.16032 ---------------------------------------------------------------------


def gb10_misses(seqlen: int, heads: int, tile: int, order: str) -> float:
    shape = AttentionShape(1, heads, seqlen, seqlen, 64)
    launch = query_tiles_outside(shape, Tile(tile, tile), order=order, wave=GB10.sms)
    found = simulate(launch, L2.of(GB10), GB10.sms, 1, fixed=True)
    return sum(found[t].fetches * launch.sizes[t] for t in "qkv") / 32


def test_gb10_misses_of_both_orders() -> None:
    """370 and 120 million sectors at batch 8, 128k tokens; nothing here was fitted to them."""
    assert gb10_misses(131072, 8, 64, "rows") == pytest.approx(370e6, rel=0.10)
    assert gb10_misses(131072, 8, 64, "sawtooth") == pytest.approx(120e6, rel=0.10)


def test_gb10_misses_begin_near_20_mib() -> None:
    """The paper's onset: K and V of 20 MiB, of a cache of 24."""
    again = {mib: gb10_misses(mib * 4096, 1, 80, "rows") / (3 * mib * 4096 * 4) for mib in (19, 23)}
    assert again[19] < 1.05
    assert again[23] > 2
