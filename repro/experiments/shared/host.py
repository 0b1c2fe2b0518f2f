"""Runs one head of a cell on the host backend: counted bytes, error against float64, seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.shapes import Tile
from kernels import attention
from kernels.launch import NUMPY_TYPES, Array, from_numpy
from repro.experiments import Context
from repro.experiments.shared.attention import TRAFFIC
from repro.measuring.cells import Cell, shape_of, tile_of
from repro.measuring.records import Record, record

Floats = NDArray[np.float64]
#: Row statistics that the caller provides; the other algorithms make their own.
GIVEN = dict.fromkeys(("flash", "flash-deterministic", "flash-split"), ("lse",))


@dataclass(frozen=True)
class HeadResult:
    """Bytes per kernel and (tensor, direction), worst error and where, and seconds of emulation."""

    traffic: dict[str, dict[tuple[str, str], int]]
    max_abs_error: float
    error_of: str
    seconds: float


def run_one_head(cell: Cell, context: Context) -> HeadResult:
    """Execute the cell's pass for one batch item and one head, on N(0, 1) inputs.

    A backward pass needs a forward pass first; only the pass of the cell is counted and timed.
    """
    shape, algorithm = shape_of(cell), str(cell["implementation"])
    dtype, scale = shape.dtype, 1 / math.sqrt(shape.head_dim)
    rng = np.random.default_rng(0)

    def normal(seqlen: int) -> NDArray[np.generic]:
        values = rng.standard_normal((1, 1, seqlen, shape.head_dim))
        return np.asarray(values, NUMPY_TYPES[dtype])

    values = {"q": normal(shape.seqlen_q), "k": normal(shape.seqlen_k)}
    values |= {"v": normal(shape.seqlen_k), "dout": normal(shape.seqlen_q)}
    for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        values[name] = np.full_like(values[like], np.nan)
    rows = {name: np.empty((1, 1, shape.seqlen_q), np.float32) for name in GIVEN.get(algorithm, ())}
    array = {n: from_numpy(n, v, "w" if n[0] in "od" else "r") for n, v in values.items()}
    stats: dict[str, Array] = {name: from_numpy(name, row, "w") for name, row in rows.items()}

    backend = context.host()
    operands = (array["q"], array["k"], array["v"], array["out"])
    gradients = (array["dq"], array["dk"], array["dv"])

    def forward(tile: Tile | None) -> None:
        attention.forward(
            backend, algorithm, *operands, stats, scale=scale, causal=shape.causal, tile=tile
        )

    backwards = cell["pass"] == "backward"
    if backwards:
        forward(None)
        backend.reset()
    start = time.perf_counter()
    if backwards:
        attention.backward(
            backend, algorithm, *operands, array["dout"], stats, *gradients,
            scale=scale, causal=shape.causal, tile=tile_of(cell),
        )  # fmt: skip
    else:
        forward(tile_of(cell))
    seconds = time.perf_counter() - start

    names = ("dq", "dk", "dv") if backwards else ("out",)
    right = reference(values, scale, shape.causal)
    errors = {n: float(np.abs(values[n][0, 0].astype(float) - right[n]).max()) for n in names}
    worst = max(errors, key=errors.__getitem__)
    traffic = {kernel: dict(entries) for kernel, entries in backend.traffic.items()}
    return HeadResult(traffic, errors[worst], worst, seconds)


def reference(
    values: dict[str, NDArray[np.generic]], scale: float, causal: bool
) -> dict[str, Floats]:
    """Dense attention of one head and its gradients in float64 (FlashAttention 2022, App. B.2)."""
    q, k, v, dout = (values[name][0, 0].astype(np.float64) for name in ("q", "k", "v", "dout"))
    scores = scale * q @ k.T
    if causal:
        row, column = np.ogrid[: len(q), : len(k)]
        scores[column > row + len(k) - len(q)] = -np.inf
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    dp = dout @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
    return {"out": p @ v, "dq": scale * ds @ k, "dk": scale * ds.T @ q, "dv": p.T @ dout}


def counted_traffic(
    experiment: str,
    cell: Cell,
    context: Context,
    run: Callable[[Cell, Context], HeadResult] = run_one_head,
) -> Iterator[Record]:
    """The same rows, counted by executing the kernels on the host backend.

    One head is executed. Traffic is linear in batch x heads (every block works on one head, and
    ``tests/experiments/test_experiments_attention.py`` shows it), so the counts are multiplied by
    B x H; the factor is in the row.
    """
    factor = int(cell["batch"]) * int(cell["heads"])
    result = run(cell, context)
    for kernel, entries in result.traffic.items():
        for (tensor, direction), count in entries.items():
            yield record(
                cell, experiment=experiment, source="measured",
                tool="host backend, one head counted",
                kernel=kernel, tensor=tensor, direction=direction, value=count * factor,
                scale_factor=factor, **TRAFFIC,
            )  # fmt: skip
    yield record(
        cell, experiment=experiment, source="measured", tool="host backend against float64",
        metric="max_abs_error", unit="1", value=result.max_abs_error, note=result.error_of,
    )  # fmt: skip
    yield record(
        cell, experiment=experiment, source="measured", tool="wall clock",
        metric="emulation_s", unit="s", value=round(result.seconds, 3),
    )  # fmt: skip
