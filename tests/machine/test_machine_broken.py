"""Pipelines with one thing wrong are caught in adversarial time; the right ones are not accused.

Caught: a fault that says what was wrong, or another result than the right one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kernels.building.compile import compile_cubin
from kernels.launch import Kernel
from kernels.machine import MachineError, Program, TensorMap, load

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC wheel")

COPIES = (
    "no wait",
    "a wait for one group fewer",
    "no commit",
    "no barrier before reading",
    "no barrier after reading",
    "one stage for two",
    "the next tile's address",
    "the last wait leaves the last copy",
)
PRODUCTS = (
    "no wait for the tile",
    "the full barrier's other parity",
    "no wait for the stage",
    "the empty barrier's other parity",
    "too few bytes expected",
    "too many bytes expected",
    "the stage given back before the products ended",
    "the stage never given back",
    "B not transposed",
    "the swizzle of 64 bytes",
    "a wrong stride of A",
    "a wrong stride of B",
    "no step along K",
    "the neighbour's coordinates",
    "one stage for two",
    "a count of two",
    "no initialisation",
    "no proxy fence",
    "no barrier before the store",
    "a wrong coordinate of the store",
    "the stored tile written again at once",
    "a barrier for too many",
)
TILES = 6


@cache
def program(arch: str) -> Program:
    text = (Path(__file__).resolve().parent / "machine_broken.cu").read_text()
    macros = (("HOPPER", 1),) if arch == "sm_90a" else ()
    return load(compile_cubin(Kernel(text, "copies_0", macros, 128), arch).cubin)


def outcome(arch: str, family: str, bug: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(1)
    if family == "copies":
        x, y = draw.standard_normal(512 * TILES).astype(np.float32), np.zeros(128, np.float32)
        program(arch).launch(
            f"copies_{bug}",
            (1, 1, 1),
            128,
            args=[x, y, np.int32(TILES)],
            adversarial=True,
            seed=seed,
            step_limit=100_000,
        )
        return y
    a = draw.standard_normal((64, 64 * TILES)).astype(np.float16)
    b = draw.standard_normal((64 * TILES, 64)).astype(np.float16)
    c = np.zeros((64, 64), np.float16)
    maps = [
        TensorMap(x, x.shape[::-1], (2 * x.shape[1],), (64, 64), swizzle) for x, swizzle in ((a, 128), (b, 128), (c, 0))
    ]
    program(arch).launch(
        f"products_{bug}",
        (1, 1, 1),
        160,
        50 * 1024,
        [*maps, np.int32(TILES)],
        adversarial=True,
        seed=seed,
        step_limit=100_000,
    )
    if bug == 0:
        exact = a.astype(np.float64) @ b.astype(np.float64)
        assert np.abs(c - exact).max() <= 2.0**-10 * np.abs(exact).max()
    return c


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("arch", "family"), [("sm_80", "copies"), ("sm_90a", "copies"), ("sm_90a", "products")])
def test_the_right_one_is_not_accused(arch: str, family: str, seed: int) -> None:
    assert np.array_equal(outcome(arch, family, 0, seed), outcome(arch, family, 0, 0))


BROKEN = [
    *(("copies", bug + 1, name) for bug, name in enumerate(COPIES)),
    *(("products", bug + 1, name) for bug, name in enumerate(PRODUCTS)),
]


@pytest.mark.parametrize(("family", "bug", "name"), BROKEN, ids=lambda value: str(value))
def test_a_broken_one_is_caught(family: str, bug: int, name: str) -> None:
    right = outcome("sm_90a", family, 0, 0)
    for seed in range(6):
        try:
            found = outcome("sm_90a", family, bug, seed)
        except MachineError:
            return
        if not np.array_equal(found, right):
            return
    raise AssertionError(f"{family}: {name} was not seen")
