"""What the attention experiments share: cells of one pass, predicted and counted traffic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from kernels import hopper
from repro.experiments import Cell, Context
from repro.prediction import sum_options
from repro.records import Record, record

TRAFFIC = {"metric": "traffic_bytes", "unit": "B", "level": "sm"}
#: Row statistics and fp32 accumulators: what an algorithm keeps beside the operands it is given.
STATISTICS = ("lse", "delta", "l", "m")


def cell(
    implementation: str,
    pass_: str,
    tile: Tile,
    *,
    seqlen: int,
    head_dim: int,
    batch: int = 1,
    heads: int = 1,
    dtype: str = "fp16",
    causal: bool = False,
    **more: Any,
) -> Cell:
    """One pass of one algorithm, self-attention with as many kv_heads as heads."""
    return Cell(
        implementation=implementation,
        pass_=pass_,
        batch=batch,
        heads=heads,
        kv_heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        block_m=tile.block_m,
        block_n=tile.block_n,
        **more,
    )


def shape_of(cell: Cell) -> AttentionShape:
    """The shape (B, H, N, D) of a cell."""
    names = ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "kv_heads", "dtype", "causal")
    values: dict[str, Any] = {name: cell[name] for name in names}
    return AttentionShape(**values)


def tile_of(cell: Cell) -> Tile:
    """The tile of a cell."""
    return Tile(int(cell["block_m"]), int(cell["block_n"]))


def sum_of(implementation: str) -> tuple[str, dict[str, Any]]:
    """The algorithm and the options of ``predict_traffic`` for an implementation, which is an
    algorithm itself or a form of the Hopper forward."""
    if implementation in hopper.FORMS:
        return hopper.ALGORITHM, sum_options(hopper.FORMS[implementation])
    return implementation, {}


def predicted_traffic(experiment: str, cell: Cell) -> Iterator[Record]:
    """A row per kernel, tensor and direction: the exact sum over the tile loop."""
    traffic = predict_traffic(
        str(cell["implementation"]), shape_of(cell), tile_of(cell), str(cell["pass"])
    )
    for kernel, entries in traffic.kernels.items():
        for (tensor, direction), count in entries.items():
            yield record(
                cell, experiment=experiment, source="predicted", tool="sum over the tile loop",
                kernel=kernel, tensor=tensor, direction=direction, value=count,
                cell=cell.id, **TRAFFIC,
            )  # fmt: skip


def counted_traffic(experiment: str, cell: Cell, context: Context) -> Iterator[Record]:
    """The same rows, counted by executing the kernels on the host backend.

    One head is executed. Traffic is linear in batch x heads (every block works on one head, and
    ``tests/cpu/test_experiments_attention.py`` shows it), so the counts are multiplied by B x H;
    the factor is in the row.
    """
    from repro.experiments._host import run_one_head

    factor = int(cell["batch"]) * int(cell["heads"])
    result = run_one_head(cell, context)
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
