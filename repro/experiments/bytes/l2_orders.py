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
from repro.experiments import Cell, Experiment
from repro.measuring.records import Record, record

NAME = "l2-orders"
TILES = {"forward": Tile(128, 64), "backward": Tile(64, 128)}
#: (heads, key/value heads, N)
SHAPES = ((1, 1, 65536), (1, 1, 131072), (1, 1, 262144), (8, 2, 65536), (8, 8, 32768), (16, 16, 16384), (32, 32, 8192))
SIDE_BY_SIDE = (2, 4, 8)
SIZED = "heads side by side within L2"


def cells() -> list[Cell]:
    """None is measured here."""
    return []


def predict(one: Cell) -> list[Record]:
    """Nothing without cells; the rows are in ``also``."""
    return []


def orders_of(shape: AttentionShape, pass_: str) -> Iterator[tuple[str, str, int]]:
    """Name, order and heads side by side."""
    yield "rows", "rows", 1
    yield "sawtooth", "sawtooth", 1
    yield SIZED, "rows", hopper_heads_per_group(shape, pass_)
    if pass_ == "forward":
        for side in SIDE_BY_SIDE:
            if side <= shape.heads:
                yield f"{side} heads side by side", "rows", side


def also() -> Iterator[Record]:
    """Bytes read from HBM per shape, pass and order; nothing where there is no C compiler."""
    if not available():
        return
    for (heads, kv_heads, seqlen), (pass_, tile) in product(SHAPES, TILES.items()):
        shape = AttentionShape(1, heads, seqlen, seqlen, 128, kv_heads, "bf16")
        main = f"flash_{pass_}"
        traffic = predict_traffic("flash", shape, tile, pass_)
        once = sum(compulsory_hbm(traffic, shape).reads[main].values())
        for name, order, side in orders_of(shape, pass_):
            hbm = predict_hbm("flash", shape, tile, pass_, H200, order=order, heads_per_group=side)
            yield record(
                {},
                experiment=NAME,
                implementation=name,
                pass_=pass_,
                source="predicted",
                batch=1,
                heads=heads,
                kv_heads=kv_heads,
                seqlen_q=seqlen,
                seqlen_k=seqlen,
                head_dim=128,
                dtype="bf16",
                causal=False,
                block_m=tile.block_m,
                block_n=tile.block_n,
                metric="hbm_read_bytes",
                level="hbm",
                unit="B",
                value=sum(hbm.reads[main].values()),
                tool=hbm.method,
                compulsory_bytes=once,
            )


EXPERIMENT = Experiment(name=NAME, title="HBM reads by order of walking", cells=cells, predict=predict, also=also)
