"""Closed forms against the integer sums, and their growth against the theorems."""

from __future__ import annotations

import numpy as np
import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import symbolic as sy
from analysis.lower_bounds import matmul_accesses_rectangular
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic


@given(
    key=st.sampled_from(list(sy.FORMS)),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    tile=st.builds(Tile, st.integers(1, 33), st.integers(1, 33)),
    head_dim=st.sampled_from([8, 64, 128]),
    dtype=st.sampled_from(["fp16", "fp32"]),
    heads=st.integers(1, 3),
)
@settings(deadline=None, max_examples=40)
def test_dense_forms_equal_the_sums(
    key: tuple[str, str], rows: int, columns: int, tile: Tile, head_dim: int, dtype: str, heads: int
) -> None:
    shape = AttentionShape(1, heads, rows * tile.block_m, columns * tile.block_n, head_dim, dtype=dtype)
    expected = predict_traffic(key[0], shape, tile, key[1]).by_tensor()
    assert sy.evaluate(sy.FORMS[key], shape, tile) == expected


@given(
    key=st.sampled_from(list(sy.FORMS)),
    tiles=st.integers(1, 12),
    block=st.integers(1, 40),
    dtype=st.sampled_from(["fp16", "fp32"]),
)
@settings(deadline=None, max_examples=40)
def test_causal_forms_equal_the_sums(key: tuple[str, str], tiles: int, block: int, dtype: str) -> None:
    n = tiles * block
    shape = AttentionShape(2, 2, n, n, 32, dtype=dtype, causal=True)
    tile = Tile(block, block)
    expected = predict_traffic(key[0], shape, tile, key[1])
    assert sy.evaluate(sy.FORMS[key], shape, tile) == expected.by_tensor()
    total = sy.causal(sy.total_form(*key))
    value = total.subs({sy.N: n, sy.Br: block, sy.d: 32, sy.e: shape.itemsize})
    assert 4 * value == expected.total_bytes


def test_forms_refuse_what_they_do_not_cover() -> None:
    form = sy.FORMS["flash", "forward"]
    with pytest.raises(ValueError, match="does not divide"):
        sy.evaluate(form, AttentionShape(1, 1, 65, 64, 64), Tile(64, 64))
    with pytest.raises(ValueError, match="square tiles"):
        sy.evaluate(form, AttentionShape(1, 1, 64, 64, 64, causal=True), Tile(32, 64))
    with pytest.raises(ValueError, match="kv_heads=1"):
        sy.evaluate(form, AttentionShape(1, 2, 64, 64, 64, kv_heads=1), Tile(64, 64))


def test_the_papers_counts_as_expressions() -> None:
    tc = sy.N / sy.Bc
    nd = sy.N * sy.d
    assert sp.expand(sy.accesses("flash1-skip-first", "forward") - (3 * tc + 1) * nd) == 0
    assert sp.expand(sy.accesses("flash1-skip-first", "backward") - (4 * tc + 4) * nd) == 0
    sixteen = {sy.e: 2}
    released = {p: sy.accesses("flash1-released", p).subs(sixteen) for p in ("forward", "backward")}
    assert sp.expand(released["forward"] - (5 * tc - 1) * nd) == 0
    assert sp.expand(released["backward"] - (6 * tc + 2) * nd) == 0
    # The literal forms hold their initialisation, one N·d each.
    assert sp.expand(sy.accesses("flash1-literal", "forward") - (3 * tc + 3) * nd) == 0
    assert sp.expand(sy.accesses("flash1-literal", "backward") - (5 * tc + 5) * nd) == 0


@pytest.mark.parametrize("algorithm", ["flash1-skip-first", "flash1-literal"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_theorems_2_and_5_by_limits(algorithm: str, pass_: str) -> None:
    """Under the paper's tile rule accesses / (N²d²/M) has a finite, positive limit: Θ(N²d²/M)."""
    count = sy.accesses(algorithm, pass_).subs(sy.Bc, sy.M / (4 * sy.d))
    theorem = sy.N**2 * sy.d**2 / sy.M
    ratio = sp.limit(sp.simplify(count / theorem), sy.N, sp.oo)
    assert ratio.is_number
    assert ratio > 0
    assert sy.growth(count, sy.N) == 2
    # At the far end of the theorem's range, M = Nd, the same expression is Θ(Nd): Prop. 3.
    at_end = sp.simplify(count.subs(sy.M, sy.N * sy.d) / (sy.N * sy.d))
    assert at_end.is_number


def test_standard_attention_is_quadratic_in_n_whatever_the_memory() -> None:
    """Θ(Nd + N²) on the papers' machine, where each operand is read once per kernel."""
    for pass_ in ("forward", "backward"):
        one_tile = sy.accesses("standard", pass_).subs({sy.Br: sy.N, sy.Bc: sy.N})
        assert sp.limit(one_tile / (sy.N**2 + sy.N * sy.d), sy.N, sp.oo) in (4, 7)


def test_block_sparse_traffic_is_affine_in_density() -> None:
    """Prop. 4: Θ(Nd + N²d²s/M)."""
    total = sy.block_sparse(sy.total_form("flash1-literal", "forward", statistics=False))
    assert sp.degree(total, sy.s) == 1
    slope = total.diff(sy.s).subs({sy.Nq: sy.N, sy.Nk: sy.N, sy.Bc: sy.M / (4 * sy.d)})
    assert sp.simplify(slope / (sy.e * sy.N**2 * sy.d**2 / sy.M)) == 12


@pytest.mark.parametrize("density", [0.125, 0.5, 1.0])
def test_block_sparse_sums_follow_the_form(density: float) -> None:
    n, block, d = 1024, 64, 64
    shape = AttentionShape(1, 1, n, n, d)
    mask = np.zeros((1, 1, 16, 16), dtype=bool)
    for i in range(16):
        for j in range(int(16 * density)):
            mask[0, 0, i, (i + j) % 16] = True
    traffic = predict_traffic("flash1-literal", shape, Tile(block, block), "forward", block_mask=mask)
    form = sy.block_sparse(sy.total_form("flash1-literal", "forward"))
    values = {sy.Nq: n, sy.Nk: n, sy.Br: block, sy.Bc: block, sy.d: d, sy.e: 2, sy.s: density}
    assert traffic.total_bytes == int(form.subs(values))


def test_best_product_tile_is_the_pebble_bound() -> None:
    tile, reads = sy.square_product_tile()
    assert tile == sp.sqrt(sy.M)
    values = {sy.N: 4096, sy.d: 64, sy.M: 10**4}
    assert float(reads.subs(values)) == pytest.approx(matmul_accesses_rectangular(4096, 4096, 64, 10**4))
    # Any other tile with as many accumulators reads more.
    n, d = 4096, 64
    for rows in (10, 50, 99, 101, 400, 1000):
        assert n * n * d * (1 / rows + rows / 10**4) > reads.subs(values)


def test_tallest_query_tile_needs_a_third_of_the_2022_accesses() -> None:
    tile, total = sy.tallest_query_tile()
    assert sp.simplify(tile - (sy.M / (2 * sy.d) - 1)) == 0
    theorem = sy.N**2 * sy.d**2 / sy.M
    quota = sp.limit(sp.limit(sp.simplify(total / theorem), sy.N, sp.oo), sy.M, sp.oo)
    assert quota == 4
    old = sy.accesses("flash1-skip-first", "forward").subs(sy.Bc, sy.M / (4 * sy.d))
    assert sp.limit(sp.simplify(old / theorem), sy.N, sp.oo) == 12
