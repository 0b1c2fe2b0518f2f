"""Torch's element-wise, softmax and layer-norm kernels, executed: right to float64, every sector."""

from __future__ import annotations

import numpy as np
import pytest

from repro.shipped import library, tensor_kernels

pytestmark = pytest.mark.skipif(library.library() is None, reason=library.MISSING)

ROWS, COLUMNS = 6, 1024
DRAW = np.random.default_rng(5)
UNIT = 2.0**-11  # half a unit in the last place of fp16, relative
X, Y = (DRAW.standard_normal((ROWS, COLUMNS)).astype(np.float16) for _ in range(2))
ARCHITECTURES = pytest.mark.parametrize("architecture", [80, 90])


def near(found: np.ndarray, exact: np.ndarray, roundings: float = 1.0) -> None:
    """Within so many roundings of fp16 of each value."""
    error = np.abs(found.astype(np.float64) - exact)
    assert (error <= roundings * UNIT * np.abs(exact) + 2.0**-25).all()


@ARCHITECTURES
def test_element_by_element(architecture: int) -> None:
    out, mask = np.zeros_like(X), DRAW.random(X.shape) < 0.7
    x, y = X.astype(np.float64), Y.astype(np.float64)
    counts = tensor_kernels.elementwise("scale", architecture, 0.3, out, X)
    near(out, x * float(np.float32(0.3)))
    assert {key: t.nbytes for key, t in counts.fields.items()} == {
        (2, "0", "write"): X.nbytes,
        (2, "1", "read"): X.nbytes,
    }
    assert {t.sectors for t in counts.traffic.values()} == {X.nbytes // 32}
    tensor_kernels.elementwise("product", architecture, 0.0, out, X, Y)
    near(out, x * y)
    counts = tensor_kernels.elementwise("masked scale", architecture, 1.25, out, X, mask)
    near(out, x * mask * 1.25)
    assert counts.fields[2, "2", "read"].nbytes == mask.nbytes


@ARCHITECTURES
def test_softmax_and_its_backward(architecture: int) -> None:
    out, dx = np.zeros_like(X), np.zeros_like(X)
    counts = tensor_kernels.softmax(architecture, out, X)
    exact = np.exp(X.astype(np.float64))
    exact /= exact.sum(1, keepdims=True)
    near(out, exact, 1.01)
    assert counts.traffic[1, "read"].sectors == counts.traffic[0, "write"].sectors == X.nbytes // 32
    given = (Y.astype(np.float64) * out).astype(np.float16)
    tensor_kernels.softmax_backward(architecture, dx, given, out)
    sums = given.astype(np.float64).sum(1, keepdims=True)
    error = np.abs(dx.astype(np.float64) - (given - sums * out))
    assert (error <= 2 * UNIT * (np.abs(given) + np.abs(sums * out)) + 2.0**-24).all()


@ARCHITECTURES
def test_layer_norm(architecture: int) -> None:
    y, weight, bias = np.zeros_like(X), X[0].copy(), Y[0].copy()
    tensor_kernels.layer_norm(architecture, y, X, weight, bias)
    x = X.astype(np.float64)
    normal = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    exact = normal * weight + bias
    error = np.abs(y.astype(np.float64) - exact)
    assert (error <= UNIT * np.abs(exact) + 2.0**-20 * (np.abs(normal * weight) + 1)).all()
