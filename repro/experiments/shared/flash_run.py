"""Runs one pass of the flash kernels on one head, counted on the host backend and judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.shapes import Tile
from repro.experiments import Cell, Context, Row, row
from repro.experiments.shared.attention import shape_of, traffic_rows
from repro.experiments.shared.host import HeadResult
from repro.instruments.run_pass import run_pass


def run(
    one: Cell,
    context: Context,
    *,
    tile: Tile | None,
    block_mask: NDArray[np.bool_] | None = None,
    bias: NDArray[np.float16] | None = None,
) -> HeadResult:
    """The cell's pass in fp16 on N(0, 1) inputs; only that pass is counted.

    tile: None lets every kernel choose; with ``block_mask`` (rows, columns) it is the block.
    bias: (Nq, Nk), added to the scores.
    """
    import torch

    from repro.attention.reference import attention_reference

    shape = shape_of(one)
    generator = torch.Generator().manual_seed(0)
    size = (1, 1, shape.seqlen_q, shape.head_dim)
    names = ("q", "k", "v", "dout")
    tensors = {name: torch.randn(size, generator=generator).half() for name in names}
    known: dict[str, Any] = {"causal": shape.causal, "window": shape.window}
    if bias is not None:
        known["bias"] = torch.from_numpy(bias)[None, None]
    options, want = {**known, "tile": tile}, dict(known)
    if block_mask is not None:
        assert tile is not None
        mask = torch.from_numpy(block_mask)
        block = (tile.block_m, tile.block_n)
        options |= {"block_mask": mask.view(torch.uint8)[None, None], "block_size": block}
        want |= {"block_mask": mask, "block": block}
    ran = run_pass(
        str(one["implementation"]), str(one["pass"]), tensors, context.host(), bias_gradient=False, **options
    )
    exact = attention_reference(*(tensors[name] for name in names), **want)
    return HeadResult(ran.traffic, ran.errors(exact))


def counted(result: HeadResult) -> Iterator[Row]:
    """The run as records: bytes per kernel, tensor and direction, and the errors."""
    yield from traffic_rows(result.traffic.kernels, tool="host backend: one head executed, bytes counted")
    for name, error in result.errors.items():
        yield row("max_abs_error", error, tool="against float64 on the same inputs", tensor=name)
