"""HBM reads of both passes for orders of walking that cost nothing at the SM boundary.

Predicted by the simulated L2 for our kernels on an H200 (d = 128, bf16, one block on an SM, 132 a
wave; tiles of 128 x 64 forward, 64 x 128 backward):

- rows: head after head, keys (backward: queries) upwards;
- sawtooth: the other way round in every second wave (``order="sawtooth"``), which finds the end of
  the walk before still in L2;
- heads side by side: as many as fit into half of L2, which is what the Hopper kernels do for the
  sake of balance, and 2, 4 and 8 whatever their size, whose keys then compete for L2.

What a launch of whole waves saves is in ``gpu-l2-registered``.
"""

from collections.abc import Iterator
from itertools import product

from analysis.hardware import H200
from analysis.hbm import compulsory_hbm, predict_hbm
from analysis.l2 import available
from analysis.l2.attention import hopper_heads_per_group
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from repro.experiments import Cell, Experiment, Row, row
from repro.experiments.shared.attention import cell, shape_of, tile_of

TILES = {"forward": Tile(128, 64), "backward": Tile(64, 128)}
#: (heads, key/value heads, N)
SHAPES = ((1, 1, 65536), (1, 1, 131072), (1, 1, 262144), (8, 2, 65536), (8, 8, 32768), (16, 16, 16384), (32, 32, 8192))
SIDE_BY_SIDE = (2, 4, 8)
SIZED = "heads side by side within L2"


def orders_of(shape: AttentionShape, pass_: str) -> Iterator[tuple[str, str, int]]:
    """Name, order and heads side by side."""
    yield "rows", "rows", 1
    yield "sawtooth", "sawtooth", 1
    yield SIZED, "rows", hopper_heads_per_group(shape, pass_)
    if pass_ == "forward":
        for side in SIDE_BY_SIDE:
            if side <= shape.heads:
                yield f"{side} heads side by side", "rows", side


def points() -> list[Cell]:
    """Every shape in both passes; nothing where there is no C compiler."""
    if not available():
        return []
    return [
        cell(None, pass_, tile, seqlen=n, head_dim=128, heads=heads, kv_heads=kv_heads, dtype="bf16")
        for (heads, kv_heads, n), (pass_, tile) in product(SHAPES, TILES.items())
    ]


def predict(one: Cell) -> Iterator[Row]:
    """Bytes read from HBM by order; the orders are the implementations."""
    shape, tile, pass_ = shape_of(one), tile_of(one), str(one["pass"])
    main = f"flash_{pass_}"
    once = sum(compulsory_hbm(predict_traffic("flash", shape, tile, pass_), shape).reads[main].values())
    for name, order, side in orders_of(shape, pass_):
        hbm = predict_hbm("flash", shape, tile, pass_, H200, order=order, heads_per_group=side)
        read = sum(hbm.reads[main].values())
        yield row("hbm_read_bytes", read, implementation=name, level="hbm", tool=hbm.method, compulsory_bytes=once)


EXPERIMENT = Experiment("l2-orders", predict=predict, also=points)
