"""Runs one pass of the flash kernels on one head, counted on the host backend and judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.shapes import Tile
from repro.experiments import Cell, Context
from repro.experiments.shared.attention import TRAFFIC, shape_of
from repro.measuring.records import Record, record


@dataclass(frozen=True)
class Run:
    """Bytes per kernel and (tensor, direction), and the largest error of each result."""

    traffic: dict[str, dict[tuple[str, str], int]]
    errors: dict[str, float]


def run(
    one: Cell,
    context: Context,
    *,
    tile: Tile | None,
    block_mask: NDArray[np.bool_] | None = None,
    bias: NDArray[np.float16] | None = None,
) -> Run:
    """The cell's pass in fp16 on N(0, 1) inputs; only that pass is counted.

    tile: None lets every kernel choose; with ``block_mask`` (rows, columns) it is the block.
    bias: (Nq, Nk), added to the scores.
    """
    import torch

    from kernels import attention
    from repro.attention.reference import attention_reference, max_error
    from repro.attention.views import array_of

    shape, algorithm = shape_of(one), str(one["implementation"])
    generator = torch.Generator().manual_seed(0)
    size = (1, 1, shape.seqlen_q, shape.head_dim)
    inputs = [torch.randn(size, generator=generator).half() for _ in range(4)]
    results = {name: torch.empty_like(inputs[0]) for name in ("out", "dq", "dk", "dv")}
    array = {
        name: array_of(name, tensor)
        for name, tensor in zip(("q", "k", "v", "dout"), inputs, strict=True)
    } | {name: array_of(name, tensor) for name, tensor in results.items()}
    stats = {"lse": array_of("lse", torch.empty(size[:3]))}
    options: dict[str, Any] = {"scale": shape.head_dim**-0.5, "causal": shape.causal, "tile": tile}
    options |= {"window": shape.window}
    want: dict[str, Any] = {"causal": shape.causal, "window": shape.window}
    if bias is not None:
        want["bias"] = torch.from_numpy(bias)[None, None]
        options["bias"] = array_of("bias", want["bias"])
    if block_mask is not None:
        assert tile is not None
        mask = torch.from_numpy(block_mask)
        options["block_mask"] = array_of("block_mask", mask.view(torch.uint8)[None, None])
        options["block_size"] = (tile.block_m, tile.block_n)
        want |= {"block_mask": mask, "block": (tile.block_m, tile.block_n)}

    backend = context.host()
    q, k, v, out = (array[name] for name in ("q", "k", "v", "out"))
    names: tuple[str, ...] = ("out",)
    attention.forward(backend, algorithm, q, k, v, out, stats, **options)
    if one["pass"] == "backward":
        names = ("dq", "dk", "dv")
        backend.reset()
        dq, dk, dv = (array[name] for name in names)
        attention.backward(
            backend, algorithm, q, k, v, out, array["dout"], stats, dq, dk, dv, **options
        )
    expected = attention_reference(*inputs, **want)
    errors = {name: max_error(results[name], getattr(expected, name)) for name in names}
    return Run({kernel: dict(counts) for kernel, counts in backend.traffic.items()}, errors)


def counted(experiment: str, one: Cell, result: Run) -> Iterator[Record]:
    """The run as records: bytes per kernel, tensor and direction, and the errors."""
    for kernel, entries in result.traffic.items():
        for (tensor, direction), count in entries.items():
            yield record(
                one, experiment=experiment, source="measured", kernel=kernel, tensor=tensor,
                tool="host backend: one head executed, bytes counted", direction=direction,
                value=count, **TRAFFIC,
            )  # fmt: skip
    for name, error in result.errors.items():
        yield record(
            one, experiment=experiment, source="measured", metric="max_abs_error", unit="1",
            tool="against float64 on the same inputs", tensor=name, value=error,
        )  # fmt: skip
