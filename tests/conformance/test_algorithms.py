"""Every option in each algorithm of the sm_80 kernels, against float64 that shares no code with
the package, and every byte against the sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import Problem, check_all

from analysis.shapes import Tile

ALGORITHMS = ("flash", "flash-split", "flash-deterministic")
#: Options whose backward is tried with partial sums in a workspace; the others' in two kernels.
PARTIAL = ("window", "block mask", "softcap", "bias of all")
SLOPES = np.float32([[0.5, 0.0], [0.03125, 2.0]])
RANDOM = np.random.default_rng(0)
KEYS = RANDOM.random((2, 91)) < 0.7
BLOCKS = RANDOM.random((2, 2, 3, 3)) < 0.6
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (20, 33), "sinks": 5},
    "causal window": {"window": (16, None), "causal": True, "sinks": 2},
    "key mask": {"key_mask": KEYS},
    "block mask": {"block_mask": BLOCKS, "block_size": (32, 32)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
    "softcap": {"softcap": 2.0},
    "ALiBi": {"alibi_slopes": SLOPES},
    "bias": {"bias": (2, 2), "causal": True},
    "shared bias": {"bias": (1, 2), "window": (20, 33)},
    "bias of all": {"bias": (1, 1)},
    "gradient of lse": {"with_dlse": True},
}


@pytest.mark.parametrize(
    ("feature", "algorithm"),
    [(f, a) for f in FEATURES for a in ("flash", "flash-deterministic" if f in PARTIAL else "flash-split")],
)
def test_an_option_in_each_algorithm(feature: str, algorithm: str) -> None:
    p = Problem(2, 2, 70, 91, 32, "fp16", kv_heads=1, **FEATURES[feature])
    check_all(p, Tile(32, 32), algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_of_them_together(algorithm: str) -> None:
    p = Problem(
        2,
        2,
        190,
        300,
        40,
        "fp16",
        True,
        kv_heads=1,
        softcap=4.0,
        bias=(2, 1),
        alibi_slopes=SLOPES[0],
        key_mask=RANDOM.random((2, 300)) < 0.7,
        dropout_p=0.2,
        dropout_seed=99,
        block_mask=RANDOM.random((2, 2, 2, 3)) < 0.7,
        block_size=(128, 128),
        with_dlse=True,
        window=(150, 20),
        sinks=7,
    )
    check_all(p, Tile(64, 64), algorithm)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(scale: float) -> None:
    check_all(Problem(1, 2, 40, 50, 32, "fp16", scale=scale, softcap=1.0), Tile(32, 32))
