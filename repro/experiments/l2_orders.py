"""HBM reads of the forward for orders of walking that cost nothing at the SM boundary.

Predicted by the simulated L2 for our forward on an H200 (d = 128, bf16, tiles of 128 x 64, one
block on an SM, 132 a wave):

- rows: head after head, keys upwards;
- sawtooth: keys downwards in every second wave (``kernels.attention.forward(order=...)``), which
  finds the end of the walk before still in L2;
- heads side by side: 2, 4 and 8 heads share the SMs at a time, so that their keys compete for L2;
  what the Hopper kernels do for the sake of balance, within a budget of L2.

What a launch of whole waves saves is in ``gpu-l2-registered``.
"""

from collections.abc import Iterator

from analysis.hardware import H200
from analysis.hbm import compulsory_hbm, predict_hbm
from analysis.l2 import available
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from repro.experiments import Cell, Experiment
from repro.records import Record, record

NAME = "l2-orders"
TILE = Tile(128, 64)
#: (heads, N)
SHAPES = ((1, 65536), (1, 131072), (1, 262144), (8, 32768), (16, 16384), (32, 8192))
SIDE_BY_SIDE = (2, 4, 8)


def cells() -> list[Cell]:
    """None is measured here."""
    return []


def predict(one: Cell) -> list[Record]:
    """Nothing without cells; the rows are in ``also``."""
    return []


def also() -> Iterator[Record]:
    """Bytes read from HBM per shape and order; nothing where there is no C compiler."""
    if not available():
        return
    for heads, seqlen in SHAPES:
        shape = AttentionShape(1, heads, seqlen, seqlen, 128, dtype="bf16")
        once = compulsory_hbm(predict_traffic("flash", shape, TILE, "forward"), shape)
        orders = [("rows", "rows", 1), ("sawtooth", "sawtooth", 1)]
        orders += [(f"{n} heads side by side", "rows", n) for n in SIDE_BY_SIDE if n <= heads]
        for name, order, side in orders:
            hbm = predict_hbm(
                "flash", shape, TILE, "forward", H200, order=order, heads_per_group=side
            )
            yield record(
                {}, experiment=NAME, implementation=name, pass_="forward", source="predicted",
                batch=1, heads=heads, kv_heads=heads, seqlen_q=seqlen, seqlen_k=seqlen,
                head_dim=128, dtype="bf16", causal=False, block_m=TILE.block_m,
                block_n=TILE.block_n, metric="hbm_read_bytes", level="hbm", unit="B",
                value=hbm.read_bytes, tool=hbm.method, compulsory_bytes=once.read_bytes,
            )  # fmt: skip


EXPERIMENT = Experiment(
    name=NAME, title="HBM reads by order of walking", cells=cells, predict=predict, also=also
)
