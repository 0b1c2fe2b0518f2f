"""The first ladder steps and the online softmax on a GPU, held to float64."""

from __future__ import annotations

import numpy as np
import pytest
from flash_support import Problem, check
from gpu_support import download, execute, missing_gpu, upload

from analysis.shapes import Tile
from kernels import ladder
from kernels.beside import online_softmax
from kernels.launching.cupy_backend import CupyBackend

REASON = missing_gpu()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}")


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("algorithm", ladder.ALGORITHMS)
def test_default_tiles(algorithm: str, dtype: str, causal: bool) -> None:
    for seqlen_q, seqlen_k in ((1, 1), (65, 65), (257, 129), (129, 512)):
        p = Problem(batch=2, heads=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype, causal=causal)
        check(p, execute(p, algorithm, None))


@pytest.mark.smoke
@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", ["flash", *ladder.ALGORITHMS])
def test_a_small_case_of_each_step(algorithm: str) -> None:
    p = Problem(batch=2, heads=2, seqlen_q=70, seqlen_k=90, dtype="fp16", causal=True)
    check(p, execute(p, algorithm, None))


@pytest.mark.parametrize("block_n", [64, 128, 256])
def test_the_tiles_of_the_papers_figure(block_n: int) -> None:
    p = Problem(batch=2, heads=4, seqlen_q=512, seqlen_k=512)
    check(p, execute(p, "flash1-skip-first", Tile(16, block_n)))


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
