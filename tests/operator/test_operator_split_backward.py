"""The split backward: dQ by a pass of its own, without atomics and without a workspace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flash_support import Problem, check, execute

from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from kernels.host import HostBackend

RNG = np.random.default_rng(0)
#: Each with what the prediction has to know beside the shape.
PROBLEMS: list[tuple[Problem, Tile, dict[str, Any]]] = [
    (Problem(batch=2, heads=4, kv_heads=2, seqlen_q=150, seqlen_k=97, causal=True), Tile(64, 32), {}),
    (
        Problem(
            batch=2,
            heads=2,
            seqlen_q=70,
            seqlen_k=130,
            head_dim=24,
            dtype="fp32",
            key_mask=RNG.random((2, 130)) < 0.6,
            dropout_p=0.3,
            dropout_seed=5,
            with_dlse=True,
        ),
        Tile(32, 32),
        {"key_mask": True, "lse_gradient": True},
    ),
    (
        Problem(
            batch=1,
            heads=2,
            seqlen_q=90,
            seqlen_k=90,
            head_dim=32,
            dtype="fp32",
            causal=True,
            block_mask=RNG.random((1, 2, 3, 3)) < 0.5,
            block_size=(32, 32),
        ),
        Tile(32, 32),
        {"mask_block": Tile(32, 32)},
    ),
]


@pytest.mark.parametrize(("problem", "tile", "options"), PROBLEMS)
def test_split_backward_is_right_and_moves_what_is_predicted(
    problem: Problem, tile: Tile, options: dict[str, Any]
) -> None:
    got, traffic = execute(problem, tile=tile, algorithm="flash-split")
    check(problem, got)
    shape = AttentionShape(
        problem.batch,
        problem.heads,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.head_dim,
        kv_heads=problem.kv_heads,
        dtype=problem.dtype,
        causal=problem.causal,
    )
    if problem.block_mask is not None:
        options = options | {"block_mask": problem.block_mask}
    predicted = predict_traffic("flash-split", shape, tile, "backward", **options)
    counted = {k: v for k, v in traffic.items() if k != "flash_forward"}
    assert counted == {kernel: dict(entries) for kernel, entries in predicted.kernels.items()}


def test_split_backward_does_not_depend_on_the_order_of_blocks() -> None:
    """The same bits whichever thread block runs first; dk and dv are those of the fused pass."""
    problem = Problem(heads=2, seqlen_q=150, seqlen_k=150, causal=True)
    fused, _ = execute(problem, tile=Tile(64, 32))
    runs = [
        execute(problem, tile=Tile(64, 32), algorithm="flash-split", backend=HostBackend(seed=seed))[0]
        for seed in (1, 2)
    ]
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(runs[0][name], runs[1][name]), name
    for name in ("dk", "dv"):
        assert np.array_equal(runs[0][name], fused[name]), name
