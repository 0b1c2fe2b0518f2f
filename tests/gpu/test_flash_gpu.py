"""The flash kernels of step 3 on a GPU, held to float64: the shapes and features that the host
backend runs in tests/sm80, at the default tiles of the device and at others."""

from __future__ import annotations

import numpy as np
import pytest
from flash_support import Problem, check
from gpu_support import execute, missing_gpu

from analysis.shapes import Tile

REASON = missing_gpu()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}")

ALGORITHMS = ("flash", "flash-deterministic", "flash-split")
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 80, 128])
def test_head_dims_and_lengths(head_dim: int, dtype: str) -> None:
    for seqlen_q, seqlen_k in ((1, 1), (17, 300), (129, 65), (257, 257)):
        for causal in (False, True):
            p = Problem(2, 3, seqlen_q, seqlen_k, head_dim, dtype, causal)
            check(p, execute(p, "flash", None))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_head_dim_256(dtype: str) -> None:
    p = Problem(1, 2, 130, 200, 256, dtype, True)
    check(p, execute(p, "flash", None))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [(64, 128), (128, 64), (16, 256), (48, 80), (16, 16), (128, 128)])
def test_tiles(tile: tuple[int, int], causal: bool) -> None:
    p = Problem(1, 2, 290, 150, 64, "fp16", causal)
    check(p, execute(p, "flash", Tile(*tile)))


@pytest.mark.smoke
@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_feature_at_once(algorithm: str) -> None:
    p = Problem(
        2,
        4,
        90,
        130,
        40,
        "fp16",
        True,
        kv_heads=2,
        key_mask=RNG.random((2, 130)) < 0.7,
        dropout_p=0.2,
        dropout_seed=2**40 + 9,
        block_mask=RNG.random((2, 4, 1, 2)) < 0.7,
        block_size=(128, 128),
        with_dlse=True,
    )
    check(p, execute(p, algorithm, None))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_features_one_by_one(head_dim: int, algorithm: str) -> None:
    for features in (
        {"kv_heads": 1},
        {"key_mask": np.arange(300) < np.array([[300], [0]])},
        {"dropout_p": 0.3, "dropout_seed": 5},
        {"block_mask": RNG.random((2, 4, 3, 3)) < 0.5, "block_size": (128, 128)},
        {"scale": -0.1},
        {"window": (70, 0), "sinks": 5},
    ):
        p = Problem(2, 4, 300, 300, head_dim, "bf16", True, **features)
        check(p, execute(p, algorithm, None))


def test_deterministic_gradients_repeat_to_the_bit() -> None:
    p = Problem(2, 4, 1000, 1000, 64, "fp16", True)
    first = execute(p, "flash-deterministic", None)
    for _ in range(5):
        again = execute(p, "flash-deterministic", None)
        assert all(np.array_equal(again[name], first[name]) for name in first)
