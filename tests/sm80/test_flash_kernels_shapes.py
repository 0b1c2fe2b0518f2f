"""The flash kernels on the host backend, every check on: right within the bounds of float64
attention, and moving exactly the predicted bytes, whatever the lengths, heads, sizes and tiles.

Few forms are compiled (a second each), and many shapes run through each of them.
"""

from __future__ import annotations

import numpy as np
import pytest
from flash_support import Problem, check_all, execute, largest_error, reference

from analysis.shapes import Tile

LENGTHS = (1, 2, 15, 17, 63, 64, 65, 127, 128, 129, 257)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_lengths_that_do_not_fill_a_tile(seqlen: int, causal: bool) -> None:
    check_all(Problem(1, 1, seqlen, seqlen, 64, "fp16", causal, seed=seqlen), Tile(64, 64))


@pytest.mark.parametrize("seqlen", LENGTHS)
def test_lengths_bf16(seqlen: int) -> None:
    check_all(Problem(1, 1, seqlen, seqlen, 128, "bf16", True, seed=seqlen), Tile(64, 64))


@pytest.mark.parametrize("seqlen", LENGTHS)
def test_lengths_fp32(seqlen: int) -> None:
    check_all(Problem(1, 1, seqlen, seqlen, 32, "fp32", True, seed=seqlen), Tile(32, 32))


@pytest.mark.parametrize(("causal", "tile"), [(c, t) for c in (False, True) for t in ((64, 128), (128, 64), (64, 64))])
def test_tile_shapes(causal: bool, tile: tuple[int, int]) -> None:
    """The causal flag reaches both passes whichever side of the tile is longer."""
    p = Problem(1, 1, 256, 256, 64, "fp16", causal)
    got = check_all(p, Tile(*tile))
    if causal:  # the last key is seen by the last query alone
        weight = np.exp(p.scale * p.data["q"][0, 0, -1] @ p.data["k"][0, 0, -1] - got["lse"][0, 0, -1])
        want = weight * p.data["dout"][0, 0, -1]
        assert largest_error(got["dv"][0, 0, -1], want) <= 5e-3


@pytest.mark.parametrize("tile", [(16, 256), (48, 80), (128, 128)])
def test_unusual_tiles(tile: tuple[int, int]) -> None:
    check_all(Problem(1, 2, 150, 290, 32, "fp16", True), Tile(*tile))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "tile"),
    [
        (8, "fp16", (48, 80)),
        (16, "fp16", (48, 80)),
        (24, "fp32", (32, 32)),
        (40, "fp16", (64, 64)),
        (80, "bf16", (64, 64)),
        (96, "bf16", (64, 64)),
    ],
)
def test_head_dims_padded_in_the_kernel(head_dim: int, dtype: str, tile: tuple[int, int]) -> None:
    """The scale is that of the caller's head_dim; padded columns add nothing and move nothing."""
    check_all(Problem(2, 2, 70, 90, head_dim, dtype, True), Tile(*tile))


@pytest.mark.parametrize(("dtype", "tile"), [("fp16", (32, 64)), ("fp32", (32, 32))])
def test_head_dim_256(dtype: str, tile: tuple[int, int]) -> None:
    """Several warps share the rows of dK and dV."""
    check_all(Problem(1, 2, 70, 130, 256, dtype, True), Tile(*tile))
    check_all(Problem(1, 1, 33, 17, 200, dtype, True), Tile(*tile))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(2, 5), (5, 2), (1, 16), (90, 70), (70, 200), (200, 70), (65, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_seqlens_that_differ(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    """Aligned bottom-right; rows above the first visible one are empty."""
    got = check_all(Problem(2, 1, seqlen_q, seqlen_k, 64, "fp16", causal), Tile(64, 64))
    if causal and seqlen_q > seqlen_k:
        empty = seqlen_q - seqlen_k
        assert not got["out"][:, :, :empty].any()
        assert (got["lse"][:, :, :empty] == -np.inf).all()
        assert not got["dq"][:, :, :empty].any()


def test_uniform_weights_show_the_alignment() -> None:
    """q = k = 0 and v = identity: out is the weight matrix itself."""
    cases: list[tuple[int, int, list[list[float]]]] = [
        (2, 5, [[1 / 4] * 4 + [0], [1 / 5] * 5]),
        (5, 2, [[0, 0]] * 3 + [[1, 0], [1 / 2, 1 / 2]]),
        (1, 16, [[1 / 16] * 16]),
    ]
    for nq, nk, rows in cases:
        p = Problem(1, 1, nq, nk, 64, "fp16", True)
        p.data["q"][:] = p.data["k"][:] = 0
        p.data["v"][0, 0] = np.eye(nk, 64)
        got = check_all(p, Tile(64, 64))
        assert largest_error(got["out"][0, 0, :, :nk], np.array(rows)) <= 1e-4
        counts = np.count_nonzero(rows, axis=1)
        with np.errstate(divide="ignore"):
            assert largest_error(got["lse"][0, 0], np.log(counts)) <= 1e-6


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("algorithm", ["flash", "flash-deterministic"])
def test_grouped_heads(kv_heads: int, algorithm: str) -> None:
    """dk and dv are sums over the group, made without atomics."""
    p = Problem(2, 6, 70, 100, 64, "fp16", True, kv_heads=kv_heads)
    check_all(p, Tile(64, 64), algorithm)


def test_grouped_heads_known_answer() -> None:
    p = Problem(1, 6, 1, 1, 64, "fp16", kv_heads=2)
    p.data["q"][:] = p.data["k"][:] = 0
    p.data["v"][0, :, 0, :] = np.arange(2)[:, None]
    p.data["dout"][:] = 1
    got = check_all(p, Tile(64, 64))
    assert got["out"][0, :, 0, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert got["dv"].shape == (1, 2, 1, 64)
    assert (got["dv"] == 3).all()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "tile"), [("fp16", 64, (64, 64)), ("bf16", 128, (64, 64)), ("fp32", 32, (32, 32))]
)
def test_a_lone_key_weighs_one(dtype: str, head_dim: int, tile: tuple[int, int]) -> None:
    """N = 1: out is v and dv is dout, to the bit."""
    p = Problem(2, 3, 1, 1, head_dim, dtype, True, seed=5)
    got = check_all(p, Tile(*tile))
    assert np.array_equal(got["out"], p.data["v"])
    assert np.array_equal(got["dv"], p.data["dout"])
    assert np.abs(got["dq"]).max() <= 1e-4
    assert np.abs(got["dk"]).max() <= 1e-4


@pytest.mark.parametrize(("dtype", "head_dim"), [("fp16", 64), ("bf16", 128)])
def test_scores_beyond_fp16(dtype: str, head_dim: int) -> None:
    """Raw products of 65536 and more: fp32 statistics, and lse precise enough to recompute P."""
    p = Problem(1, 1, 1, 4, head_dim, dtype, True)
    p.data["q"][:] = p.data["k"][:] = 32
    p.data["v"][0, 0] = np.arange(4)[:, None]
    p.data["dout"][:] = 1
    got, _ = execute(p, tile=Tile(64, 64))
    assert (got["out"] == 1.5).all()
    score = 1024 * head_dim**0.5
    assert largest_error(got["lse"], np.array([[[score + np.log(4)]]])) <= 0.01
    assert np.abs(got["dv"] / 0.25 - 1).max() <= 1e-3
    want = 8 * head_dim**0.5 * np.array([-1.5, -0.5, 0.5, 1.5])
    assert largest_error(got["dk"][0, 0], np.repeat(want[:, None], head_dim, 1)) <= 0.5
    assert np.abs(got["dq"]).max() <= 0.5


def test_default_tiles_run() -> None:
    """The tiles used when none is named, forward and backward different ones."""
    p = Problem(1, 2, 200, 200, 64, "fp16", True)
    got, _ = execute(p)
    for name, value in reference(p).items():
        assert largest_error(got[name], value) <= 5e-3, name
