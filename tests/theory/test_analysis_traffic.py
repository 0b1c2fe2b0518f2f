"""Exact SM-boundary sums: against counts made by hand, and against a direct walk over the tiles."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import analysis.traffic
from analysis.algorithms import ALGORITHMS
from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from analysis.traffic import Traffic, predict_traffic


def _one_head(n: int, causal: bool = False) -> AttentionShape:
    return AttentionShape(1, 1, n, n, 64, causal=causal)


@pytest.mark.parametrize(
    ("n", "causal", "read_bytes"),
    [
        (64, False, 24_576),
        (65, False, 41_600),
        (65, True, 41_344),
        (128, False, 81_920),
        (128, True, 65_536),
        (129, False, 115_584),
    ],
)
def test_query_outer_forward_reads_counted_by_hand(n: int, causal: bool, read_bytes: int) -> None:
    traffic = predict_traffic("flash", _one_head(n, causal), Tile(64, 64), "forward")
    assert traffic.read_bytes == read_bytes


def test_ragged_forward_writes_real_rows_only() -> None:
    traffic = predict_traffic("flash", _one_head(65), Tile(64, 64), "forward")
    assert traffic.write_bytes == 65 * 64 * 2 + 65 * 4 == 8_580


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "pairs"), [(2, 5, 9), (5, 2, 3), (1, 16, 16), (1024, 1024, 524_800)])
def test_causal_pairs_are_bottom_right_aligned(seqlen_q: int, seqlen_k: int, pairs: int) -> None:
    shape = AttentionShape(1, 1, seqlen_q, seqlen_k, 64, causal=True)
    assert shape.visible_pairs == pairs


shapes = st.builds(
    AttentionShape,
    batch=st.integers(1, 2),
    heads=st.sampled_from([2, 4]),
    seqlen_q=st.integers(1, 70),
    seqlen_k=st.integers(1, 70),
    head_dim=st.sampled_from([8, 64]),
    kv_heads=st.sampled_from([None, 1, 2]),
    dtype=st.sampled_from(["fp16", "fp32"]),
    causal=st.booleans(),
)
tiles = st.builds(Tile, block_m=st.integers(1, 40), block_n=st.integers(1, 40))


def _visible(shape: AttentionShape, i: int, j: int) -> bool:
    return not shape.causal or j <= i + shape.seqlen_k - shape.seqlen_q


def _visited_tiles(shape: AttentionShape, tile: Tile) -> set[tuple[int, int]]:
    """Tile pairs that contain a visible (query, key) pair, found by looking at every pair."""
    return {
        (i // tile.block_m, j // tile.block_n)
        for i in range(shape.seqlen_q)
        for j in range(shape.seqlen_k)
        if _visible(shape, i, j)
    }


@given(shapes)
def test_visible_pairs_equal_counting_them(shape: AttentionShape) -> None:
    pairs = sum(_visible(shape, i, j) for i in range(shape.seqlen_q) for j in range(shape.seqlen_k))
    assert shape.visible_pairs == pairs


@given(shapes, tiles)
@settings(deadline=None)
def test_tile_loop_visits_exactly_the_tiles_that_show_something(shape: AttentionShape, tile: Tile) -> None:
    visited = _visited_tiles(shape, tile)
    loop = tile_loop(shape, tile)
    assert sum(loop.query_rows) == shape.seqlen_q
    assert sum(loop.key_rows) == shape.seqlen_k
    for i in range(loop.query_tiles):
        assert loop.visits_of_query_tile[i] == sum(pair[0] == i for pair in visited)
    for j in range(loop.key_tiles):
        assert loop.visits_of_key_tile[j] == sum(pair[1] == j for pair in visited)


@given(shapes, tiles)
@settings(deadline=None)
def test_deterministic_backward_trades_atomics_for_a_workspace(shape: AttentionShape, tile: Tile) -> None:
    atomic = predict_traffic("flash", shape, tile, "backward").by_tensor()
    workspace = predict_traffic("flash-deterministic", shape, tile, "backward").by_tensor()
    partials = atomic.pop(("dq_accum", "atomic"))
    whole = shape.batch * shape.heads * shape.seqlen_q * shape.head_dim * 4
    assert atomic.pop(("dq_accum", "write")) == atomic.pop(("dq_accum", "read")) == whole
    assert workspace.pop(("dq_accum", "write")) == workspace.pop(("dq_accum", "read")) == partials
    assert atomic == workspace


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_batch_of_heads_is_that_many_heads(algorithm: str, pass_: str) -> None:
    one = predict_traffic(algorithm, AttentionShape(1, 1, 65, 33, 64), Tile(16, 32), pass_)
    many = predict_traffic(algorithm, AttentionShape(3, 5, 65, 33, 64), Tile(16, 32), pass_)
    assert many.by_tensor() == {key: 15 * count for key, count in one.by_tensor().items()}


def test_traffic_adds_up_by_kernel_and_drops_zeros() -> None:
    left = Traffic({"a": {("q", "read"): 1, ("k", "read"): 0}})
    right = Traffic({"a": {("q", "read"): 2}, "b": {("dq", "atomic"): 5, ("dq", "write"): 7}})
    total = left + right
    assert left.kernels == {"a": {("q", "read"): 1}}
    assert total.kernels["a"] == {("q", "read"): 3}
    assert (total.read_bytes, total.write_bytes, total.total_bytes) == (3, 12, 15)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"heads": 6, "kv_heads": 4}, ["heads=6", "kv_heads=4"]),
        ({"seqlen_q": 0}, ["seqlen_q=0"]),
        ({"head_dim": -8}, ["head_dim=-8"]),
        ({"dtype": "fp64"}, ["fp64", "fp16"]),
    ],
)
def test_impossible_shapes_are_refused_with_both_values(arguments: dict[str, object], names: list[str]) -> None:
    whole = {"batch": 1, "heads": 2, "seqlen_q": 4, "seqlen_k": 4, "head_dim": 8} | arguments
    with pytest.raises(ValueError, match=names[0]) as caught:
        AttentionShape(**whole)  # type: ignore[arg-type]
    assert all(name in str(caught.value) for name in names)


def test_the_example_in_the_docstring_is_right() -> None:
    results = doctest.testmod(analysis.traffic)
    assert results.attempted
    assert not results.failed


def test_unknown_names_are_refused() -> None:
    shape, tile = _one_head(64), Tile(64, 64)
    with pytest.raises(ValueError, match="flash9"):
        predict_traffic("flash9", shape, tile, "forward")
    with pytest.raises(ValueError, match="sideways"):
        predict_traffic("flash", shape, tile, "sideways")
    with pytest.raises(ValueError, match="colour"):
        predict_traffic("flash", shape, tile, "forward", colour=1)
    with pytest.raises(ValueError, match="kv_heads=1"):
        predict_traffic("flash1-skip-first", AttentionShape(1, 2, 8, 8, 64, kv_heads=1), tile, "forward")
