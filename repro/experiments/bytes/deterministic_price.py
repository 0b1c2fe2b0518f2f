"""The price of a deterministic backward pass: four ways to sum dQ over the key tiles.

================  ================================================================================
flash             atomic additions into one fp32 accumulator (FlashAttention-2, Alg. 2): any order
flash-determin…   every key tile writes its share to a workspace, which is added up in order; the
                  workspace grows with Nq · Nk · d / block_n
flash-split       dQ in a pass of its own with the queries outside: no sum leaves the chip, but
                  scores and their gradients are computed twice, seven products instead of five
flash-sm90        the first on Hopper, with tiles of its own
flash-sm90-det…   the same additions there, in turns: a counter a query tile says which key tile is
                  to add, and every visit reads and writes it once
================  ================================================================================

Bytes across the SM boundary of the whole backward, predicted and counted; scratch memory and
products from the same loop. What waiting for a turn costs is time, which is not counted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analysis import memory
from analysis.shapes import Tile
from analysis.tile_loop import tile_loop
from analysis.traffic import predict_traffic
from kernels import hopper
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, shape_of, tile_of, traffic_rows
from repro.experiments.shared.flash_run import counted, run

HOPPER = (hopper.ALGORITHM, hopper.DETERMINISTIC)
ALGORITHMS = ("flash", "flash-deterministic", "flash-split", *HOPPER)
#: What a deterministic way is set beside: the same kernels with additions in any order.
BASELINES = {"flash-deterministic": "flash", "flash-split": "flash", hopper.DETERMINISTIC: hopper.ALGORITHM}
EXECUTED, SUMMED = (128, 256, 512, 1024), (2048, 4096, 8192, 16384)
#: The kernels' own tiles for head dimension 64; the second pass of the split form has queries
#: outside and therefore a tall one.
HEAD_DIM, TILE, QUERY_TILE = 64, Tile(64, 128), Tile(128, 64)
HOPPER_TILE = hopper.backward_form(HEAD_DIM, causal=False).tile
#: Products of an (Nq, Nk) by d shape: S, dP, dV, dK, dQ; the split form makes S and dP again.
PRODUCTS = dict.fromkeys(ALGORITHMS, 5) | {"flash-split": 7}


def point(algorithm: str, seqlen: int, causal: bool) -> Cell:
    """One backward pass of one head."""
    tile = HOPPER_TILE if algorithm in HOPPER else TILE
    return cell(algorithm, "backward", tile, seqlen=seqlen, head_dim=HEAD_DIM, causal=causal)


def cells() -> list[Cell]:
    """The lengths that are executed."""
    return [
        point(algorithm, seqlen, causal)
        for causal in (False, True)
        for seqlen in EXECUTED
        for algorithm in ALGORITHMS
        if not causal or seqlen == EXECUTED[-1]
    ]


def predict(one: Cell) -> Iterator[Row]:
    """Exact sums; scratch bytes and floating-point operations from the same loop."""
    shape, tile, algorithm = shape_of(one), tile_of(one), str(one["implementation"])
    traffic = dict(predict_traffic(algorithm, shape, tile, "backward").kernels)
    if algorithm == "flash-split":  # its second pass has a tile of its own
        second = predict_traffic(algorithm, shape, QUERY_TILE, "backward")
        traffic["flash_backward_dq"] = second.kernels["flash_backward_dq"]
    yield from traffic_rows(traffic)
    if algorithm in HOPPER:
        turns = algorithm == hopper.DETERMINISTIC
        scratch = memory.total(memory.flash_sm90_scratch(shape, tile, deterministic=turns))
    else:
        accumulator = shape.batch * shape.heads * shape.seqlen_q * shape.head_dim * 4
        slabs = {"flash": 1, "flash-split": 0}.get(algorithm, tile_loop(shape, tile).key_tiles)
        scratch = shape.row_bytes + slabs * accumulator
    yield row("scratch_bytes", scratch, tool="from the tile loop")
    flops = 2 * PRODUCTS[algorithm] * shape.visible_pairs * shape.head_dim
    yield row("flops", flops, tool="from the tile loop")


def also() -> Iterator[Cell]:
    """The sums where nothing is executed."""
    for seqlen in SUMMED:
        for algorithm in ALGORITHMS:
            yield point(algorithm, seqlen, causal=False)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """The kernels, executed and counted; the scratch they ask the backend for."""
    backend = context.host()
    asked: dict[str, int] = {}
    empty = backend.empty

    def counting(name: str, shape: tuple[int, ...], dtype: str) -> Any:
        array = empty(name, shape, dtype)
        asked[name] = array.size * array.itemsize
        return array

    backend.empty = counting
    try:
        # No tile named: every kernel takes its own, which are TILE, QUERY_TILE and HOPPER_TILE.
        result = run(one, context, tile=None)
    finally:
        backend.empty = empty
    asked.pop("tile_counter", None)  # of the forward before
    yield from counted(result)
    yield row("scratch_bytes", sum(asked.values()), tool="what the driver allocates")


EXPERIMENT = Experiment(
    "deterministic-price", cells, predict, measure, device="host", also=also, seconds=40, on_demand=True
)
