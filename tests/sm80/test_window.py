"""Sliding windows and sinks: the closed forms, and the kernels that follow them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import Problem, check_all, execute
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.flops import executed_flops, pairs_in_blocks, useful_flops
from analysis.hardware import H200
from analysis.hbm import WAVES_ASKED, compulsory_hbm, predict_hbm
from analysis.l2 import available
from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from analysis.traffic import predict_traffic
from analysis.window import sides
from kernels.launches import Device, launches_of
from repro.prediction import predict

side = st.none() | st.integers(0, 60)
shapes = st.builds(
    AttentionShape,
    batch=st.just(1),
    heads=st.just(1),
    seqlen_q=st.integers(1, 50),
    seqlen_k=st.integers(1, 50),
    head_dim=st.just(8),
    causal=st.booleans(),
    window=st.tuples(side, side),
    sinks=st.integers(0, 55),
)
tiles = st.builds(Tile, block_m=st.integers(1, 20), block_n=st.integers(1, 20))


def seen(shape: AttentionShape) -> np.ndarray:
    """(Nq, Nk), from the definition."""
    diagonal = np.arange(shape.seqlen_q)[:, None] + shape.seqlen_k - shape.seqlen_q
    key = np.arange(shape.seqlen_k)
    left, right = shape.window
    inside = key >= diagonal - left if left is not None else key >= 0
    if right is not None:
        inside = inside & (key <= diagonal + right)
    inside = np.broadcast_to(inside | (key < shape.sinks), (shape.seqlen_q, shape.seqlen_k))
    return inside & (key <= diagonal) if shape.causal else inside


@given(shapes, tiles)
@settings(deadline=None)
def test_closed_forms_count_what_the_definition_leaves(shape: AttentionShape, tile: Tile) -> None:
    pairs, window = seen(shape), shape.visible
    assert shape.visible_pairs == pairs.sum()
    assert window.rows_that_see == pairs.any(1).sum()
    assert window.keys_seen == pairs.any(0).sum()
    edges = np.arange(shape.seqlen_k + 1)
    before = np.concatenate([np.zeros((shape.seqlen_q, 1), int), pairs.cumsum(1)], axis=1)
    assert np.array_equal(window.seen_before(edges), before)
    plain = AttentionShape(1, 1, shape.seqlen_q, shape.seqlen_k, 8, causal=shape.causal)
    assert shape.windowed == (plain.visible_pairs != shape.visible_pairs)

    of_rows = np.logical_or.reduceat(pairs, np.arange(0, shape.seqlen_q, tile.block_m), axis=0)
    met = np.logical_or.reduceat(of_rows, np.arange(0, shape.seqlen_k, tile.block_n), axis=1)
    loop = tile_loop(shape, tile)
    assert np.array_equal(loop.visits_of_query_tile, met.sum(1))
    assert np.array_equal(loop.visits_of_key_tile, met.sum(0))
    assert loop.elements_left_by_causal == loop.query_rows @ met @ loop.key_rows
    sinks, first, end = window.key_tiles(tile.block_m, tile.block_n)
    j = np.arange(met.shape[1])
    assert np.array_equal(met, (j < sinks[:, None]) | ((j >= first[:, None]) & (j < end[:, None])))
    first, end = window.query_tiles(tile.block_m, tile.block_n)
    i = np.arange(met.shape[0])[:, None]
    assert np.array_equal(met, (i >= first) & (i < end))

    assert useful_flops(shape, "forward") == 4 * 8 * pairs.sum()
    assert useful_flops(shape, "forward") <= executed_flops(shape, tile, "forward")
    whole = np.ones(met.shape, bool)
    assert pairs_in_blocks(shape, whole, tile) == pairs.sum()


PROBLEMS = [
    {"window": (40, 0), "causal": True},
    {"window": (20, 33), "sinks": 5},
    {"window": (0, 0)},
    {"window": (None, 0), "sinks": 100},
    {"window": (16, None), "seqlen_q": 70, "seqlen_k": 200},  # keys that no query sees
    {"window": (3, 9), "seqlen_q": 200, "seqlen_k": 70},  # queries that see no key
    {"window": (3, None), "sinks": 2, "seqlen_q": 200, "seqlen_k": 70, "causal": True},
]


@pytest.mark.parametrize(
    ("changes", "algorithm"),
    [(changes, ("flash-split", "flash-deterministic", "flash")[number % 3]) for number, changes in enumerate(PROBLEMS)],
    ids=str,
)
def test_every_backward_follows_the_window(changes: dict[str, Any], algorithm: str) -> None:
    sizes = {"seqlen_q": 150, "seqlen_k": 150, "head_dim": 32, "dtype": "fp16"}
    problem = Problem(**sizes | {"heads": 2, "kv_heads": 1, "with_dlse": True} | changes)
    check_all(problem, Tile(32, 32), algorithm)


def test_a_sawtooth_walks_the_same_tiles() -> None:
    problem = Problem(seqlen_q=200, seqlen_k=200, head_dim=32, window=(40, 10), sinks=20)
    rows, counted = execute(problem, tile=Tile(32, 32))
    turned, also = execute(problem, tile=Tile(32, 32), order="sawtooth", wave=2)
    assert counted == also
    for name, values in rows.items():
        assert np.abs(values - turned[name]).max() < 1e-2, name
    assert any((rows[name] != turned[name]).any() for name in rows)  # sums in another order


def test_a_window_that_hides_nothing_is_the_same_kernel() -> None:
    for changes in ({"window": (99, 99)}, {"window": (3, 3), "sinks": 100}, {"sinks": 7}):
        shape = AttentionShape(1, 1, 100, 100, 64, **changes)
        assert not shape.windowed
        launch = launches_of("flash", shape, "forward").main
        plain = launches_of("flash", AttentionShape(1, 1, 100, 100, 64), "forward").main
        assert launch.kernel == plain.kernel
    assert AttentionShape(1, 1, 100, 100, 64, window=(98, 99)).windowed


def test_what_has_no_window_says_so() -> None:
    shape = AttentionShape(1, 1, 256, 256, 64, causal=True, window=(16, 0))
    for name, pass_ in (("standard", "forward"), ("flash1-literal", "backward"), ("flash-sm90-optimistic", "forward")):
        with pytest.raises(ValueError, match=rf"the {pass_} of {name} does not take window: window=\(16, 0\), sinks=0"):
            predict_traffic(name, shape, Tile(64, 64), pass_)
    for name in ("standard", "flash1-literal"):
        with pytest.raises(ValueError, match=f"{name} does not take window"):
            launches_of(name, shape, "forward")
    hopper = Device("90")
    wide = AttentionShape(1, 1, 256, 256, 64, causal=True, window=(255, 0))
    assert launches_of("auto", wide, "forward", hopper).algorithm == "flash-sm90"


@pytest.mark.parametrize("window", [(-1, 0), (0, -2)])
def test_minus_one_is_no_spelling_of_unlimited(window: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is below 0; None is unlimited"):
        sides(window)


def test_behind_l2_a_window_moves_each_tensor_about_once() -> None:
    """Neighbouring query tiles share the keys of their windows while those are in L2, so that HBM
    sees little more than each tensor once although the SMs read K and V many times."""
    if not available():
        pytest.skip("no C compiler to simulate L2 with")
    shape = AttentionShape(1, 16, 65536, 65536, 128, causal=True, window=(1024, 0))
    found = predict("auto", shape, "forward", H200)
    once = found.compulsory.read_bytes
    assert found.traffic.read_bytes > 4 * once
    assert once <= found.hbm.read_bytes < 1.2 * once
    asked = predict_hbm(found.algorithm, shape, found.tile, "forward", H200, waves=True)
    assert asked.method != WAVES_ASKED  # waves in step know no window


def test_keys_that_no_query_sees_stay_where_they_are() -> None:
    shape = AttentionShape(1, 1, 64, 4096, 64, window=(64, 0), sinks=4)
    once = compulsory_hbm(predict_traffic("flash", shape, Tile(64, 64), "forward"), shape)
    assert once.reads["flash_forward"]["k"] == (64 + 64 + 4) * 64 * 2
