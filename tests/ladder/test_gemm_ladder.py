"""The tiling ladder of a matrix product: right, and every byte at every level as predicted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.gemm import VARIANTS, GemmShape, GemmTile, fast_elements, lower_bound_bytes, predict_gemm, square
from kernels.beside.gemm import DEFAULT_TILES, gemm, gemm_kernel
from kernels.host import HostBackend
from kernels.launch import from_numpy

CASES = [
    ("naive", None),
    ("tiled", square(8)),
    ("tiled", square(16)),
    ("tiled", square(32)),
    ("three-level", GemmTile(32, 32, 8, 16, 32, 4, 4)),
    ("three-level", GemmTile(64, 32, 16, 32, 16, 4, 4)),
    ("three-level", GemmTile(64, 64, 16, 32, 32, 8, 4)),
    ("tensor-core", GemmTile(32, 32, 16, 16, 16)),
    ("tensor-core", GemmTile(64, 32, 32, 32, 16)),
    ("tensor-core", GemmTile(64, 64, 32, 32, 32)),
]
SHAPES = [(64, 64, 64), (33, 40, 24), (70, 72, 88), (1, 8, 8)]


def bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values in the kernel's type; bf16 as its bits, truncated (the values fit)."""
    if dtype == "bf16":
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype({"fp16": np.float16, "fp32": np.float32}[dtype])


def floats(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def run(variant: str, tile, shape: GemmShape) -> tuple[HostBackend, float, float]:
    """The backend with its counters, the largest error, and the bound it must meet."""
    random = np.random.default_rng(0)
    a, b = (bits(bits_safe(random.standard_normal(s)), shape.dtype) for s in ((shape.m, shape.k), (shape.k, shape.n)))
    c = np.full((shape.m, shape.n), 77, a.dtype)
    backend = HostBackend()
    arrays = [from_numpy(name, x, how, shape.dtype) for name, x, how in (("x", a, "r"), ("y", b, "r"), ("z", c, "w"))]
    gemm(backend, variant, *arrays, tile)
    left, right = floats(a, shape.dtype), floats(b, shape.dtype)
    exact = left @ right
    # rounding of the result, and of a sum of k products in fp32 in any order
    unit = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}[shape.dtype]
    bound = unit * abs(exact) + shape.k * 2.0**-24 * (abs(left) @ abs(right))
    error = abs(floats(c, shape.dtype) - exact)
    return backend, float((error - bound).max()), float(error.max())


def bits_safe(x: np.ndarray) -> np.ndarray:
    """Rounded to 7 fraction bits, so that every type holds the values exactly."""
    return np.round(x * 32).astype(np.float32) / 32


@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize(("variant", "tile"), CASES, ids=str)
def test_values_and_bytes(variant: str, tile, size) -> None:
    dtype = "fp16" if variant == "tensor-core" else "fp32"
    shape = GemmShape(*size, dtype)
    backend, excess, _ = run(variant, tile, shape)
    assert excess <= 0
    predicted = predict_gemm(variant, shape, tile)
    (entry,) = backend.traffic
    assert backend.traffic[entry] == {
        ("a", "read"): predicted.a_read,
        ("b", "read"): predicted.b_read,
        ("c", "write"): predicted.c_write,
    }
    shared = backend.shared_traffic[entry]
    assert (shared["read"], shared["write"]) == (predicted.shared_read, predicted.shared_write)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_types(variant: str, dtype: str) -> None:
    if (variant, dtype) == ("tensor-core", "fp32"):
        with pytest.raises(ValueError, match="fp16 or bf16, got 'fp32'"):
            gemm_kernel(variant, dtype)
        return
    shape = GemmShape(48, 40, 56, dtype)
    backend, excess, _ = run(variant, None, shape)
    assert excess <= 0
    predicted = predict_gemm(variant, shape, DEFAULT_TILES.get(variant))
    assert sum(backend.traffic[gemm_kernel(variant, dtype).entry].values()) == (predicted.global_bytes)


@given(size=st.tuples(*[st.integers(1, 300)] * 3), side=st.sampled_from([8, 16, 32]))
def test_no_tiling_beats_the_lower_bound(size, side: int) -> None:
    shape = GemmShape(*size)
    for variant, tile in (("naive", None), ("tiled", square(side))):
        moved = predict_gemm(variant, shape, tile).global_bytes
        assert moved >= lower_bound_bytes(shape, fast_elements(variant, tile))


def test_traffic_falls_with_the_tile_and_stays_within_a_factor_of_the_bound() -> None:
    shape = GemmShape(1024, 1024, 1024)
    naive = predict_gemm("naive", shape)
    for side in (8, 16, 32):
        tiled = predict_gemm("tiled", shape, square(side))
        assert (tiled.a_read + tiled.b_read) * side == naive.a_read + naive.b_read
        ratio = tiled.global_bytes / lower_bound_bytes(shape, fast_elements("tiled", square(side)))
        assert 1 < ratio < 1.9  # √3 from keeping two operand tiles beside the result, and C
    # the thread tile is what relieves shared memory
    one = predict_gemm("three-level", shape, GemmTile(64, 64, 16, 32, 32, 8, 4))
    plain = predict_gemm("tiled", shape, square(32))
    assert one.shared_read / (1 / 8 + 1 / 4) == plain.shared_read / 2  # reads a multiply-add


def test_bad_arguments() -> None:
    x = np.zeros((4, 8), np.float32)
    a, b = from_numpy("a", x, "r"), from_numpy("b", np.zeros((9, 4), np.float32), "r")
    c = from_numpy("c", np.zeros((4, 4), np.float32), "w")
    backend = HostBackend()
    with pytest.raises(ValueError, match=r"a \(4, 8\) and b \(9, 4\)"):
        gemm(backend, "naive", a, b, c)
    with pytest.raises(ValueError, match=r"c is \(4, 4\), the product is \(4, 8\)"):
        gemm(backend, "naive", a, from_numpy("b", np.zeros((8, 8), np.float32), "r"), c)
    with pytest.raises(ValueError, match="got 'fast'"):
        gemm_kernel("fast", "fp32")
    with pytest.raises(ValueError, match="32 thread tiles"):
        gemm_kernel("three-level", "fp32", GemmTile(64, 64, 16, 32, 32, 4, 4))
    with pytest.raises(ValueError, match="multiples of 16"):
        gemm_kernel("tensor-core", "fp16", GemmTile(64, 64, 24, 32, 32))
    half = [np.zeros(s, np.float16) for s in ((8, 7), (7, 8), (8, 8))]
    with pytest.raises(ValueError, match="multiples of 8, got 7, 8"):
        gemm(backend, "tensor-core", *(from_numpy("x", h, "rw") for h in half))
    with pytest.raises(ValueError, match="needs a tile"):
        predict_gemm("tiled", GemmShape(8, 8, 8))
