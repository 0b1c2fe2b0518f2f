"""Milakov & Gimelshein 2018 on the host backend: values, and accesses an element exactly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from flash_support import aligned, to_bits, to_float, view

from kernels.beside import online_softmax
from kernels.host import HostBackend
from kernels.launch import ITEMSIZE, Array

# Fewer columns than threads, a full round of them, one more, and many rounds.
COLUMNS = (1, 2, 31, 255, 256, 257, 1000, 5000)
# fp32: rounding x log2(e) costs |x| 2^-24, and |x| <= 60 here. Else twice half a last place.
RELATIVE = {"fp32": 8e-6, "fp16": 2e-3, "bf16": 1.6e-2}
FLUSHED = 1.2e-38  # ex2.approx.ftz: what is smaller than a normal fp32 number is 0


def array(name: str, values: np.ndarray, dtype: str) -> tuple[Array, np.ndarray]:
    memory = aligned(values.shape, "fp32" if dtype == "int32" else dtype)
    memory = memory.view(np.int32) if dtype == "int32" else memory
    memory[...] = values if dtype == "int32" else to_bits(values, dtype)
    return view(name, memory, dtype), memory


def softmax(x: np.ndarray) -> np.ndarray:
    top = x.max(axis=1, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0.0))
    total = e.sum(axis=1, keepdims=True)
    return e / np.where(total > 0, total, 1.0)


def run(algorithm: str, x: np.ndarray, dtype: str = "fp32") -> tuple[np.ndarray, dict[tuple[str, str], int]]:
    backend = HostBackend()
    given, _ = array("x", x, dtype)
    result, memory = array("y", np.full(x.shape, np.nan), dtype)
    online_softmax.softmax(backend, algorithm, given, result)
    return to_float(memory, dtype), backend.traffic[f"softmax_{algorithm}"]


def run_topk(
    launch: Callable[..., None], x: np.ndarray, k: int, dtype: str = "fp32"
) -> tuple[np.ndarray, np.ndarray, int]:
    """Values, indices, and bytes moved."""
    backend = HostBackend()
    given, _ = array("x", x, dtype)
    values, value_memory = array("values", np.full((len(x), k), np.nan), "fp32")
    indices, index_memory = array("indices", np.full((len(x), k), -7), "int32")
    launch(backend, given, values, indices)
    moved = sum(count for entries in backend.traffic.values() for count in entries.values())
    return to_float(value_memory, "fp32"), index_memory, moved


@pytest.mark.parametrize("algorithm", online_softmax.ALGORITHMS)
def test_values_and_accesses(algorithm: str) -> None:
    rng = np.random.default_rng(0)
    for cols in COLUMNS:
        x = 3.0 * rng.standard_normal((3, cols)).astype(np.float32).astype(float)
        y, counted = run(algorithm, x)
        np.testing.assert_allclose(y, softmax(x), rtol=RELATIVE["fp32"], err_msg=f"{cols} columns")
        reads = online_softmax.ACCESSES[algorithm] - 1
        assert counted == {("x", "read"): reads * x.size * 4, ("y", "write"): x.size * 4}
        moved = sum(counted.values())
        assert moved == online_softmax.predict_bytes(algorithm, 3, cols, "fp32")


def test_accesses_are_three_four_and_three() -> None:
    accesses = {name: online_softmax.ACCESSES[name] for name in online_softmax.ALGORITHMS}
    assert accesses == {"naive": 3, "safe": 4, "online": 3}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_narrow_types(dtype: str) -> None:
    x = to_float(to_bits(np.random.default_rng(1).standard_normal((2, 300)), dtype), dtype)
    y, counted = run("online", x, dtype)
    np.testing.assert_allclose(y, softmax(x), rtol=RELATIVE[dtype])
    assert sum(counted.values()) == 3 * x.size * ITEMSIZE[dtype]


def test_naive_overflows_and_the_others_do_not() -> None:
    """e^100 is above the largest fp32; that is why the safe form exists."""
    x = np.array([[100.0, 99.0, 0.0]])
    naive, _ = run("naive", x)
    assert np.isnan(naive[0, 0])
    for algorithm in ("safe", "online"):
        np.testing.assert_allclose(run(algorithm, x)[0], softmax(x), rtol=RELATIVE["fp32"], atol=FLUSHED)


@pytest.mark.parametrize("algorithm", ["safe", "online"])
def test_masked_elements_and_empty_rows(algorithm: str) -> None:
    """-inf weighs nothing, also where it comes first; a row of nothing else is 0."""
    x = np.full((3, 600), -np.inf)
    x[0, 300:] = np.linspace(-5.0, 5.0, 300)
    x[1, 599] = -20000.0
    x = x.astype(np.float32).astype(float)
    y, _ = run(algorithm, x)
    np.testing.assert_allclose(y, softmax(x), rtol=RELATIVE["fp32"], atol=FLUSHED)
    assert y[1, 599] == 1.0
    np.testing.assert_array_equal(y[2], 0.0)


def test_the_order_of_a_row_does_not_matter() -> None:
    """Theorem 1: d is right whether the maximum changes at every element or at the first only."""
    rising = np.linspace(-30.0, 30.0, 2000).astype(np.float32).astype(float)[None]
    up, _ = run("online", rising)
    down, _ = run("online", rising[:, ::-1].copy())
    np.testing.assert_allclose(up, softmax(rising), rtol=RELATIVE["fp32"], atol=FLUSHED)
    np.testing.assert_allclose(down[:, ::-1], up, rtol=RELATIVE["fp32"], atol=FLUSHED)


def sorted_topk(p: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Reference: by value, equal values by index; 0 and -1 past the end of the row."""
    order = np.argsort(-p, axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(p, order, axis=1)
    missing = k - order.shape[1]
    pad = ((0, 0), (0, missing))
    return np.pad(values, pad), np.pad(order, pad, constant_values=-1)


@pytest.mark.parametrize("k", [1, 5, 30])
def test_fused_topk_reads_once(k: int) -> None:
    rng = np.random.default_rng(k)
    for cols in (3, 257, 2000):
        x = rng.standard_normal((2, cols)).astype(np.float32).astype(float)
        values, indices, moved = run_topk(online_softmax.softmax_topk, x, k)
        want_values, want_indices = sorted_topk(softmax(x), k)
        np.testing.assert_array_equal(indices, want_indices)
        np.testing.assert_allclose(values, want_values, rtol=RELATIVE["fp32"])
        assert moved == x.size * 4 + 2 * k * 8
        assert moved == online_softmax.predict_bytes("online-topk", 2, cols, "fp32", k)


def test_equal_values_are_ordered_by_index() -> None:
    x = np.zeros((1, 700))
    x[0, [3, 400, 650]] = 1.0
    _, indices, _ = run_topk(online_softmax.softmax_topk, x, 5)
    assert indices.tolist() == [[3, 400, 650, 0, 1]]


def test_unfused_topk_adds_one_access() -> None:
    """Safe softmax then top-k: 5 accesses; online then top-k: 4; fused: 1."""
    x = np.random.default_rng(3).standard_normal((2, 900)).astype(np.float32).astype(float)
    for algorithm, accesses in (("safe", 5), ("online", 4)):
        y, counted = run(algorithm, x)
        values, indices, moved = run_topk(online_softmax.topk, y, 5)
        answer = 2 * 5 * 8
        assert sum(counted.values()) + moved - answer == accesses * x.size * 4
        want_values, want_indices = sorted_topk(y, 5)
        np.testing.assert_array_equal(indices, want_indices)
        np.testing.assert_array_equal(values, want_values)


def test_bad_arguments() -> None:
    backend = HostBackend()
    x, _ = array("x", np.zeros((2, 8)), "fp32")
    short, _ = array("y", np.zeros((2, 7)), "fp32")
    with pytest.raises(ValueError, match=r"\(2, 7\).*\(2, 8\)"):
        online_softmax.softmax(backend, "online", x, short)
    with pytest.raises(ValueError, match=r"'fast'.*naive, safe, online"):
        online_softmax.softmax(backend, "fast", x, x)
    values, _ = array("values", np.zeros((2, 33)), "fp32")
    with pytest.raises(ValueError, match=r"k = 33 .*32"):
        online_softmax.softmax_topk(backend, x, values, values)
    column = Array("x", x.pointer, (2, 4), (8, 1), "fp32", "r")
    with pytest.raises(ValueError, match="not contiguous"):
        online_softmax.softmax(backend, "online", column, column)
