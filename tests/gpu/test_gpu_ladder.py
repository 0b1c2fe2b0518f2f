"""The first ladder steps and the online softmax on a GPU, held to float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import Problem, check, to_bits, to_float

from analysis.shapes import Tile
from kernels import attention, ladder, online_softmax
from kernels.cupy_backend import CupyBackend
from kernels.launch import Array, contiguous_strides


def missing_gpu() -> str | None:
    """Why there is no GPU to test on, or None."""
    try:
        CupyBackend()
    except RuntimeError as error:
        return str(error)
    return None


REASON = missing_gpu()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}")


def upload(name: str, bits: np.ndarray, dtype: str) -> Array:
    import cupy

    memory = cupy.asarray(bits)
    return Array(
        name, memory.data.ptr, bits.shape, contiguous_strides(bits.shape), dtype, "rw", memory
    )


def download(array: Array) -> np.ndarray:
    import cupy

    return cupy.asnumpy(array.owner)


def execute(p: Problem, algorithm: str, tile: Tile | None) -> dict[str, np.ndarray]:
    """Both passes on the GPU; results hold NaN beforehand."""
    backend = CupyBackend()
    arrays = {
        name: upload(name, to_bits(p.data[name], p.dtype), p.dtype)
        for name in ("q", "k", "v", "dout")
    }
    for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        blank = np.full(p.data[like].shape, np.nan)
        arrays[name] = upload(name, to_bits(blank, p.dtype), p.dtype)
    stats: dict[str, Array] = {}
    options: dict[str, Any] = {
        "scale": p.scale,
        "causal": p.causal,
        "tile": tile,
        "shared_limit_bytes": backend.shared_limit_bytes,
    }
    inputs = [arrays[name] for name in ("q", "k", "v", "out")]
    gradients = [arrays[name] for name in ("dq", "dk", "dv")]
    attention.forward(backend, algorithm, *inputs, stats, **options)
    attention.backward(backend, algorithm, *inputs, arrays["dout"], stats, *gradients, **options)
    names = ("out", "dq", "dk", "dv")
    return {name: to_float(download(arrays[name]), p.dtype) for name in names}


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("algorithm", ladder.ALGORITHMS)
def test_default_tiles(algorithm: str, dtype: str, causal: bool) -> None:
    for seqlen_q, seqlen_k in ((1, 1), (65, 65), (257, 129), (129, 512)):
        p = Problem(
            batch=2, heads=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype, causal=causal
        )
        check(p, execute(p, algorithm, None))


@pytest.mark.parametrize("block_n", [64, 128, 256])
def test_the_tiles_of_the_papers_figure(block_n: int) -> None:
    p = Problem(batch=2, heads=4, seqlen_q=512, seqlen_k=512)
    check(p, execute(p, "flash1", Tile(16, block_n)))


@pytest.mark.parametrize("algorithm", ladder.ALGORITHMS)
def test_odd_head_dim_and_tiles(algorithm: str) -> None:
    tile = Tile(13, 24) if algorithm == "standard" else Tile(13, 27)
    p = Problem(heads=2, seqlen_q=100, seqlen_k=77, head_dim=40, dtype="fp32", causal=True)
    check(p, execute(p, algorithm, tile))


def test_online_softmax() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 3001)).astype(np.float32)
    e = np.exp(x.astype(float) - x.max(axis=1, keepdims=True))
    want = e / e.sum(axis=1, keepdims=True)
    backend = CupyBackend()
    given = upload("x", x, "fp32")
    for algorithm in online_softmax.ALGORITHMS:
        result = upload("y", np.full_like(x, np.nan), "fp32")
        online_softmax.softmax(backend, algorithm, given, result)
        np.testing.assert_allclose(download(result), want, rtol=4e-6)
    values = upload("values", np.full((50, 5), np.nan, np.float32), "fp32")
    indices = upload("indices", np.full((50, 5), -7, np.int32), "int32")
    online_softmax.softmax_topk(backend, given, values, indices)
    order = np.argsort(-x, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(download(indices), order)
    np.testing.assert_allclose(download(values), np.take_along_axis(want, order, axis=1), rtol=4e-6)
