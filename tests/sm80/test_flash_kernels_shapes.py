"""The flash kernels on the host backend, every check on: right within the bounds of float64
attention, and moving exactly the predicted bytes, whatever the lengths, heads, sizes and tiles.

Few forms are compiled (a second each), and many shapes run through each of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import Problem, check, check_all, execute

from analysis.hardware import A100_80GB, H200
from analysis.shapes import Tile
from kernels.flash_config import SHARED_LIMIT_BYTES, configure

LENGTHS = (1, 2, 15, 17, 63, 64, 65, 127, 128, 129, 257)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal", "tile"),
    [
        ("fp16", 64, False, Tile(64, 64)),
        ("fp16", 64, True, Tile(64, 64)),
        ("bf16", 128, True, Tile(64, 64)),
        ("fp32", 32, True, Tile(32, 32)),
    ],
)
def test_lengths_that_do_not_fill_a_tile(dtype: str, head_dim: int, causal: bool, tile: Tile) -> None:
    for seqlen in LENGTHS:
        check_all(Problem(1, 1, seqlen, seqlen, head_dim, dtype, causal, seed=seqlen), tile)


@pytest.mark.parametrize("tile", [(16, 256), (48, 80), (128, 128)])
def test_unusual_tiles(tile: tuple[int, int]) -> None:
    check_all(Problem(1, 2, 150, 290, 32, "fp16", True), Tile(*tile))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "tile"), [(8, "fp16", (48, 80)), (24, "fp32", (32, 32)), (80, "bf16", (64, 64))]
)
def test_head_dims_padded_in_the_kernel(head_dim: int, dtype: str, tile: tuple[int, int]) -> None:
    """The scale is that of the caller's head_dim; padded columns add nothing and move nothing."""
    check_all(Problem(2, 2, 70, 90, head_dim, dtype, True), Tile(*tile))


@pytest.mark.parametrize(("dtype", "tile"), [("fp16", (32, 64)), ("fp32", (32, 32))])
def test_head_dim_256(dtype: str, tile: tuple[int, int]) -> None:
    """Several warps share the rows of dK and dV."""
    check_all(Problem(1, 2, 70, 130, 256, dtype, True), Tile(*tile))
    check_all(Problem(1, 1, 33, 17, 200, dtype, True), Tile(*tile))


@pytest.mark.parametrize("causal", [False, True])
def test_seqlens_that_differ(causal: bool) -> None:
    """Aligned bottom-right; rows above the first visible one are empty."""
    for seqlen_q, seqlen_k in ((2, 5), (5, 2), (1, 16), (90, 70), (70, 200), (200, 70), (65, 1)):
        got = check_all(Problem(2, 1, seqlen_q, seqlen_k, 64, "fp16", causal), Tile(64, 64))
        if causal and seqlen_q > seqlen_k:
            empty = seqlen_q - seqlen_k
            assert not got["out"][:, :, :empty].any()
            assert (got["lse"][:, :, :empty] == -np.inf).all()
            assert not got["dq"][:, :, :empty].any()


@pytest.mark.parametrize("algorithm", ["flash", "flash-deterministic"])
def test_grouped_heads(algorithm: str) -> None:
    """dk and dv are sums over the group, made without atomics."""
    for kv_heads in (1, 2, 6):
        check_all(Problem(2, 6, 70, 100, 64, "fp16", True, kv_heads=kv_heads), Tile(64, 64), algorithm)


def test_default_tiles_run() -> None:
    """The tiles used when none is named, forward and backward different ones."""
    p = Problem(1, 2, 200, 200, 64, "fp16", True)
    check(p, execute(p)[0])


SHORT = 70_000
"""Bytes of shared memory for one stage of the tile 128 x 64 at head_dim 128, too few for two."""
IN_TURN: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (40, 5), "sinks": 3},
    "keys": {"key_mask": np.arange(150)[None] % 3 > 0},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 5},
    "slopes": {"alibi_slopes": np.array([0.5, 0.25], np.float32)},
}


@pytest.mark.parametrize("more", IN_TURN.values(), ids=IN_TURN.keys())
def test_tiles_in_turn_are_right_and_move_the_same_bytes(more: dict[str, Any]) -> None:
    """K and V with one buffer each, where shared memory is short."""
    p = Problem(heads=2, seqlen_q=140, seqlen_k=150, head_dim=128, **more)
    (short, moved), (_, also) = (
        execute(p, backward=False, shared_limit_bytes=limit) for limit in (SHORT, SHARED_LIMIT_BYTES)
    )
    assert moved == also
    check(p, short)


def test_an_a100_holds_two_blocks_of_one_stage_where_two_stages_leave_one() -> None:
    """Head dimension 128 in 16 bits: 64 KiB instead of 96, four warps of 32 rows instead of eight."""
    a100, h200 = (configure("forward", "fp16", 128, limit=gpu.shared_bytes_per_block) for gpu in (A100_80GB, H200))
    assert (a100.stages, a100.num_warps, a100.blocks_per_sm(A100_80GB.shared_bytes_per_block)) == (1, 4, 2)
    assert (h200.stages, h200.num_warps) == (2, 8)
    for head_dim, dtype, feature in ((64, "fp16", None), (128, "fp32", None), (128, "fp16", "bias")):
        features = [feature] if feature else []
        form = configure("forward", dtype, head_dim, limit=A100_80GB.shared_bytes_per_block, features=features)
        assert form.stages == 2
