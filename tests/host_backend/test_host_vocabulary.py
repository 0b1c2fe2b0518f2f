"""Each function of the device vocabulary on the host against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.host import HostBackend
from kernels.launch import Kernel, from_numpy

SOURCE = (Path(__file__).resolve().parents[1] / "support" / "vocabulary.cu").read_text()
DTYPES = {"fp16": 0, "bf16": 1}


def kernel(entry: str, threads: int = 32, dtype: str = "fp16") -> Kernel:
    return Kernel(SOURCE, entry, (("DTYPE", DTYPES[dtype]),), threads)


def widen(bits: np.ndarray, dtype: str) -> np.ndarray:
    """16-bit patterns as float32."""
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 to 16-bit patterns, round to nearest even, NaN to the canonical one."""
    with np.errstate(over="ignore"):
        if dtype == "fp16":
            bits = x.astype(np.float16).view(np.uint16)
        else:
            u = x.view(np.uint32).astype(np.uint64)
            bits = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def awkward_floats() -> np.ndarray:
    """Every class of float32, with ties, borders and neighbours of each."""
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    # Ties of both formats: the dropped bits are exactly one half, or one off.
    ties16 = (patterns[:40_000] & 0xFFFFE000) + 0x1000 + rng.integers(-1, 2, 40_000)
    tiesb = (patterns[:40_000] & 0xFFFF0000) + 0x8000 + rng.integers(-1, 2, 40_000)
    # The exponents where fp16 is subnormal, ends, or overflows.
    near = (rng.integers(100, 145, 60_000) << 23) | rng.integers(0, 2**23, 60_000)
    borders = [0.0, np.inf, np.nan, 65504, 65519.996, 65520, 65536, 2**-14, 2**-126, 1e-45]
    subnormal_ties = [2**-24, 2**-25, 1.5 * 2**-24, 2.5 * 2**-24]
    large = [3.4028235e38, 3.3961e38, 1.0078125]
    special = np.array([*borders, *subnormal_ties, *large], np.float32).view(np.uint32)
    parts = [patterns, ties16, tiesb, near, special, special ^ 0x80000000]
    all_bits = np.concatenate([part.astype(np.uint32) for part in parts])
    return np.resize(all_bits, len(all_bits) // 2 * 2).view(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions(dtype: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    floats = awkward_floats()
    widened = np.empty(65536, np.float32)
    narrowed = np.empty(len(floats), np.uint16)
    packed = np.empty(len(floats) // 2, np.uint32)
    unpacked = np.empty(len(floats), np.float32)
    HostBackend().launch(
        kernel("convert", 128, dtype),
        (4, 1, 1),
        0,
        [
            from_numpy("in", patterns, "r", dtype),
            from_numpy("widened", widened, "w"),
            from_numpy("floats", floats, "r"),
            from_numpy("narrowed", narrowed, "w", dtype),
            from_numpy("packed", packed.view(np.int32), "w"),
            from_numpy("unpacked", unpacked, "w"),
            np.int32(65536),
            np.int32(len(floats)),
        ],
    )
    np.testing.assert_array_equal(widened, widen(patterns, dtype))
    signs = np.signbit(widened) == (patterns >> 15 == 1)
    assert signs[~np.isnan(widened)].all()
    expected = narrow(floats, dtype)
    np.testing.assert_array_equal(narrowed, expected)
    np.testing.assert_array_equal(packed.view(np.uint16), expected)
    np.testing.assert_array_equal(unpacked, widen(expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma_fragments(dtype: str) -> None:
    rng = np.random.default_rng(2)
    shape = (64, 1, 16, 16)
    a_bits = narrow(rng.standard_normal(shape).astype(np.float32), dtype)
    b_bits = narrow(rng.standard_normal((64, 1, 8, 16)).astype(np.float32), dtype)
    c = rng.standard_normal((64, 1, 16, 8)).astype(np.float32)
    d = c.copy()
    backend = HostBackend()
    args: list[Any] = [
        from_numpy("a", a_bits, "r", dtype),
        from_numpy("b", b_bits, "r", dtype),
        from_numpy("d", d, "rw"),
    ]
    backend.launch(kernel("multiply", 32, dtype), (64, 1, 1), 0, args)
    a, b = (widen(x, dtype).astype(np.float64) for x in (a_bits, b_bits))
    exact = c + np.einsum("bhik,bhjk->bhij", a, b)
    # 16 fused steps in fp32, each rounded once.
    bound = 17 * 2.0**-24 * (abs(c) + np.einsum("bhik,bhjk->bhij", abs(a), abs(b)))
    assert (abs(d - exact) <= bound).all()
    assert backend.traffic["multiply"] == {
        ("a", "read"): a_bits.nbytes,
        ("b", "read"): b_bits.nbytes,
        ("d", "read"): d.nbytes,
        ("d", "write"): d.nbytes,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma_keeps_every_element_in_its_place(dtype: str) -> None:
    # A single 1 in A picks one element of one column of B: all 16 x 16 x 8 combinations.
    a = np.zeros((16, 16, 16, 16), np.float32)  # (i k, ...) as batch of 256
    for i in range(16):
        for k in range(16):
            a[i, k, i, k] = 1
    a_bits = narrow(a.reshape(256, 1, 16, 16), dtype)
    for j in range(8):
        b = np.zeros((256, 1, 8, 16), np.float32)
        b[:, :, j, :] = np.arange(1, 17)
        d = np.zeros((256, 1, 16, 8), np.float32)
        args: list[Any] = [
            from_numpy("a", a_bits, "r", dtype),
            from_numpy("b", narrow(b, dtype), "r", dtype),
            from_numpy("d", d, "rw"),
        ]
        HostBackend().launch(kernel("multiply", 32, dtype), (256, 1, 1), 0, args)
        expected = np.zeros_like(d).reshape(16, 16, 16, 8)
        for i in range(16):
            expected[i, np.arange(16), i, j] = np.arange(1, 17)
        np.testing.assert_array_equal(d.reshape(16, 16, 16, 8), expected)


def test_mma_special_values() -> None:
    a = np.zeros((1, 1, 16, 16), np.float16)
    b = np.ones((1, 1, 8, 16), np.float16)
    a[0, 0, 0, 3], a[0, 0, 1, 5], a[0, 0, 2, 7] = np.inf, np.nan, 2**-24  # a subnormal half counts
    a[0, 0, 3, :2] = np.inf, -np.inf
    a[0, 0, 4, :] = 65504  # far beyond fp16, well inside fp32
    d = np.zeros((1, 1, 16, 8), np.float32)
    args: list[Any] = [from_numpy("a", a, "r"), from_numpy("b", b, "r"), from_numpy("d", d, "rw")]
    HostBackend().launch(kernel("multiply"), (1, 1, 1), 0, args)
    assert np.isposinf(d[0, 0, 0]).all()
    assert np.isnan(d[0, 0, 1]).all()
    assert (d[0, 0, 2] == 2**-24).all()
    assert np.isnan(d[0, 0, 3]).all()
    assert (d[0, 0, 4] == 16 * 65504).all()
    assert (d[0, 0, 5:] == 0).all()


def test_ldmatrix_and_cp_async() -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 65536, (64, 8), dtype=np.uint16)
    rows = rng.permutation(64).astype(np.int32)
    plain, transposed = np.empty((64, 4), np.int32), np.empty((64, 4), np.int32)
    backend = HostBackend()
    args: list[Any] = [
        from_numpy("in", values.reshape(-1), "r", "fp16"),
        from_numpy("rows", rows, "r"),
        from_numpy("plain", plain.reshape(-1), "w"),
        from_numpy("transposed", transposed.reshape(-1), "w"),
    ]
    backend.launch(kernel("matrices", 64), (1, 1, 1), 64 * 48, args)
    # PTX: thread i gives row i % 8 of matrix i / 8 and gets row i / 4, columns 2 (i % 4)..
    tiles = values[rows].reshape(2, 4, 8, 8)  # warp, matrix, row, column
    for out, source in ((plain, tiles), (transposed, tiles.swapaxes(2, 3))):
        pairs = np.ascontiguousarray(source).view(np.uint32)  # warp, matrix, g, q
        expected = pairs.reshape(2, 4, 32).swapaxes(1, 2)
        np.testing.assert_array_equal(out.view(np.uint32).reshape(2, 32, 4), expected)
    # An invalid copy reads nothing.
    assert backend.traffic["matrices"][("in", "read")] == values.nbytes


def test_shuffles_and_indices() -> None:
    threads, grid = 64, (3, 2, 4)
    blocks = 24
    by_xor = np.empty((blocks, threads, 5), np.int32)
    from_lane = np.empty((blocks, threads), np.float32)
    who = np.empty((blocks, threads, 8), np.int32)
    args: list[Any] = [
        from_numpy("by_xor", by_xor.reshape(-1), "w"),
        from_numpy("from_lane", from_lane.reshape(-1), "w"),
        from_numpy("who", who.reshape(-1), "w"),
    ]
    HostBackend().launch(kernel("lanes", threads), grid, 0, args)
    t = np.arange(threads)
    for bit in range(5):
        np.testing.assert_array_equal(by_xor[..., bit], [(t ^ (1 << bit)) ** 2] * blocks)
    expected = 0.5 * (t // 32 * 32 + (7 * t + 3) % 32)
    np.testing.assert_array_equal(from_lane, [expected] * blocks)
    for block in range(blocks):
        x, y, z = block % 3, block // 3 % 2, block // 6
        np.testing.assert_array_equal(who[block, :, 0], t)
        np.testing.assert_array_equal(who[block, :, 1:], [[x, y, z, threads, 3, 2, 4]] * threads)


def test_functions() -> None:
    rng = np.random.default_rng(4)
    x = np.concatenate(
        [
            rng.uniform(-130, 130, 20_000),
            rng.uniform(-1, 1, 20_000),
            np.arange(-140, 141),
            np.arange(-280, 281) / 2,
            [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, -3e38, 127.99999, -126],
            2.0 ** rng.uniform(-149, 127, 5_000),
        ]
    ).astype(np.float32)
    powers, logs, reciprocals, tangents, larger = (np.empty_like(x) for _ in range(5))
    bits = np.empty(len(x), np.int32)
    HostBackend().launch(
        kernel("functions", 64),
        (1, 1, 1),
        0,
        [
            from_numpy("x", x, "r"),
            *(from_numpy(n, v, "w") for n, v in [("powers", powers), ("logs", logs)]),
            from_numpy("reciprocals", reciprocals, "w"),
            from_numpy("tangents", tangents, "w"),
            from_numpy("larger", larger, "w"),
            from_numpy("bits", bits, "w"),
            np.int32(len(x)),
        ],
    )
    with np.errstate(all="ignore"):
        exact = np.exp2(x.astype(np.float64))
        exact[exact < 2.0**-126] = 0  # flushed
        exact[exact >= 2.0**128] = np.inf
        flushed = np.where(abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float64)
        log = np.log2(flushed)
        inverse = 1 / flushed
        inverse[abs(inverse) < 2.0**-126] = 0
    finite = np.isfinite(exact) & (exact > 0)
    assert (abs(powers[finite] / exact[finite] - 1) <= 2.0**-22).all()  # PTX: 2^-22.5 + 2^-23
    np.testing.assert_array_equal(powers[~finite], exact[~finite].astype(np.float32))
    whole = (x == np.rint(x)) & finite
    np.testing.assert_array_equal(powers[whole], exact[whole])
    np.testing.assert_allclose(logs, log, rtol=2.0**-22, atol=2.0**-22)
    np.testing.assert_allclose(reciprocals, inverse.astype(np.float32), rtol=2.0**-23)  # 1 ulp
    tangent = np.tanh(x.astype(np.float64))
    np.testing.assert_allclose(tangents, tangent, rtol=2.0**-11, atol=2.0**-149)
    np.testing.assert_array_equal(tangents[abs(x) > 9.02], np.sign(x[abs(x) > 9.02]))
    np.testing.assert_array_equal(larger, np.fmax(x, np.float32(1)))
    np.testing.assert_array_equal(bits, x.view(np.int32))


def test_every_width_moves_its_bytes() -> None:
    rng = np.random.default_rng(5)
    values = rng.integers(0, 256, (3, 2, 96), dtype=np.uint8)
    out = np.zeros_like(values)
    backend = HostBackend()
    args: list[Any] = [from_numpy("in", values, "r"), from_numpy("out", out, "w")]
    backend.launch(kernel("widths", 32), (1, 1, 1), 96, args)
    np.testing.assert_array_equal(out, values)
    assert backend.traffic["widths"] == {("in", "read"): 576, ("out", "write"): 576}
