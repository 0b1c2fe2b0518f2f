"""Runs one head of a cell on the host backend: counted bytes, error against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.traffic import Traffic
from kernels.launch import NUMPY_TYPES
from repro.experiments import Context, Row, row
from repro.experiments.shared.attention import traffic_rows
from repro.instruments.run_pass import run_pass
from repro.measuring.cells import Cell, shape_of, tile_of

if TYPE_CHECKING:
    from torch import Tensor

    from repro.attention.reference import Reference


@dataclass(frozen=True)
class HeadResult:
    """Bytes, and the largest error of each result."""

    traffic: Traffic
    errors: Mapping[str, float]

    @property
    def error_of(self) -> str:
        """The result that is furthest off."""
        return max(self.errors, key=self.errors.__getitem__)


def run_one_head(cell: Cell, context: Context) -> HeadResult:
    """Execute the cell's pass for one batch item and one head, on N(0, 1) inputs.

    Only the pass of the cell is counted, and runs in the cell's tile.
    """
    tensors = normal(cell)
    ran = run_pass(
        str(cell["implementation"]),
        str(cell["pass"]),
        tensors,
        context.host(),
        causal=shape_of(cell).causal,
        tile=tile_of(cell),
    )
    return HeadResult(ran.traffic, ran.errors(reference(cell, tensors)))


def normal(cell: Cell) -> dict[str, Tensor]:
    """q, k, v and dout of one head, in the cell's type."""
    import torch

    shape, rng = shape_of(cell), np.random.default_rng(0)
    rows = {"q": shape.seqlen_q, "k": shape.seqlen_k, "v": shape.seqlen_k, "dout": shape.seqlen_q}
    return {
        name: torch.from_numpy(rng.standard_normal((1, 1, n, shape.head_dim)).astype(NUMPY_TYPES[shape.dtype]))
        for name, n in rows.items()
    }


def reference(cell: Cell, tensors: Mapping[str, Tensor], **options: Any) -> Reference:
    """Float64 attention of the cell's tensors."""
    from repro.attention.reference import attention_reference

    q, k, v, dout = (tensors[name] for name in ("q", "k", "v", "dout"))
    return attention_reference(q, k, v, dout, causal=shape_of(cell).causal, **options)


def counted_traffic(
    cell: Cell, context: Context, run: Callable[[Cell, Context], HeadResult] = run_one_head
) -> Iterator[Row]:
    """The same rows, counted by executing the kernels on the host backend.

    One head is executed. Traffic is linear in batch x heads (every block works on one head, and
    ``tests/experiments/test_experiments_attention.py`` shows it), so the counts are multiplied by
    B x H; the factor is in the row.
    """
    factor = int(cell["batch"]) * int(cell["heads"])
    result = run(cell, context)
    yield from traffic_rows(
        result.traffic.kernels, tool="host backend, one head counted", times=factor, scale_factor=factor
    )
    worst = result.error_of
    yield row("max_abs_error", result.errors[worst], tool="host backend against float64", note=worst)
