"""The price of a deterministic backward pass: three ways to sum dQ over the key tiles.

================  ================================================================================
flash             atomic additions into one fp32 accumulator (FlashAttention-2, Alg. 2): any order
flash-determin…   every key tile writes its share to a workspace, which is added up in order; the
                  workspace grows with Nq · Nk · d / block_n
flash-split       dQ in a pass of its own with the queries outside: no sum leaves the chip, but
                  scores and their gradients are computed twice, seven products instead of five
================  ================================================================================

Bytes across the SM boundary of the whole backward, predicted and counted; scratch memory and
products from the same loop. The time needs a GPU (``gpu-deterministic-price``).
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis.shapes import Tile
from analysis.tile_loop import tile_loop
from repro.experiments import Cell, Context, Experiment
from repro.experiments._attention import (
    cell,
    counted_traffic,
    predicted_traffic,
    shape_of,
    tile_of,
)
from repro.records import Record, record

NAME = "deterministic-price"
ALGORITHMS = ("flash", "flash-deterministic", "flash-split")
EXECUTED, SUMMED = (128, 256, 512, 1024), (2048, 4096, 8192, 16384)
HEAD_DIM, TILE = 64, Tile(64, 128)
#: Products of an (Nq, Nk) by d shape: S, dP, dV, dK, dQ; the split form makes S and dP again.
PRODUCTS = {"flash": 5, "flash-deterministic": 5, "flash-split": 7}


def point(algorithm: str, seqlen: int, causal: bool) -> Cell:
    """One backward pass of one head."""
    return cell(algorithm, "backward", TILE, seqlen=seqlen, head_dim=HEAD_DIM, causal=causal)


def cells() -> list[Cell]:
    """The lengths that are executed."""
    return [
        point(algorithm, seqlen, causal)
        for causal in (False, True)
        for seqlen in EXECUTED
        for algorithm in ALGORITHMS
        if not causal or seqlen == EXECUTED[-1]
    ]


def predict(one: Cell) -> Iterator[Record]:
    """Exact sums; scratch bytes and floating-point operations from the same loop."""
    yield from predicted_traffic(NAME, one)
    shape, tile = shape_of(one), tile_of(one)
    algorithm = str(one["implementation"])
    accumulator = shape.batch * shape.heads * shape.seqlen_q * shape.head_dim * 4
    slabs = {"flash": 1, "flash-split": 0}.get(algorithm, tile_loop(shape, tile).key_tiles)
    for metric, unit, value in (
        ("scratch_bytes", "B", shape.row_bytes + slabs * accumulator),
        ("flops", "FLOP", 2 * PRODUCTS[algorithm] * shape.visible_pairs * shape.head_dim),
    ):
        yield record(one, experiment=NAME, source="predicted", tool="from the tile loop",
                     metric=metric, unit=unit, value=value, cell=one.id)  # fmt: skip


def also() -> Iterator[Record]:
    """The sums where nothing is executed."""
    for seqlen in SUMMED:
        for algorithm in ALGORITHMS:
            yield from predict(point(algorithm, seqlen, causal=False))


def measure(one: Cell, context: Context) -> Iterator[Record]:
    """The kernels, executed and counted; the scratch they ask the backend for."""
    backend = context.host()
    asked: list[int] = []
    empty = backend.empty

    def counting(name, shape, dtype):  # type: ignore[no-untyped-def]
        array = empty(name, shape, dtype)
        if name in ("delta", "dq_accum"):
            asked.append(array.size * array.itemsize)
        return array

    backend.empty = counting
    try:
        yield from counted_traffic(NAME, one, context)
    finally:
        backend.empty = empty
    yield record(one, experiment=NAME, source="measured", tool="what the driver allocates",
                 metric="scratch_bytes", unit="B", value=sum(asked))  # fmt: skip


EXPERIMENT = Experiment(
    name=NAME,
    title="what a deterministic backward costs",
    cells=cells,
    predict=predict,
    measure=measure,
    device="host",
    also=also,
    seconds=40,
)
