"""The two traffic levels: what crosses the SM boundary, and what L2 lets through to HBM.

Measured on an H200 with hardware counters for PyTorch's FlashAttention-2 forward (bf16, d = 128,
query tiles of 128 rows, two thread blocks per SM). Predicted: the sum over the tile loop, and for
HBM compulsory bytes with K and V read once per wave where they exceed the usable L2.
"""

from collections.abc import Iterator

from analysis.hardware import H200
from analysis.hbm import compulsory_hbm, predict_hbm
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from repro.experiments import Cell, Experiment
from repro.records import Record, record

NAME = "l2-absorption"
TILE = Tile(128, 64)
BLOCKS_PER_SM = 2
SEQLENS = tuple(sorted({128 * round(2 ** (k / 8) * 8) for k in range(8 * 9 + 1)}))


def cells() -> list[Cell]:
    """None is executed here: the records are of a GPU."""
    return []


def predict(one: Cell) -> list[Record]:
    """Nothing to predict without cells; the curves are in ``also``."""
    return []


def also() -> Iterator[Record]:
    """Both levels, reads only: one head at every length, four heads at one."""
    for seqlen, heads in [(n, 1) for n in SEQLENS] + [(131072, 4)]:
        shape = AttentionShape(1, heads, seqlen, seqlen, 128, dtype="bf16")
        traffic = predict_traffic("flash", shape, TILE, "forward")
        waved = predict_hbm("flash", shape, TILE, "forward", H200, BLOCKS_PER_SM)
        values = {
            "sram_read_bytes": ("sm", traffic.read_bytes, "sum over the tile loop"),
            "hbm_read_bytes": ("hbm", waved.read_bytes, "compulsory, and re-reads per wave"),
            "hbm_compulsory_bytes": (
                "hbm", compulsory_hbm(traffic, shape).read_bytes, "each tensor once",
            ),
        }  # fmt: skip
        for metric, (level, value, tool) in values.items():
            yield record(
                {}, experiment=NAME, implementation="flash", pass_="forward", source="predicted",
                batch=1, heads=heads, kv_heads=heads, seqlen_q=seqlen, seqlen_k=seqlen,
                head_dim=128, dtype="bf16", causal=False, block_m=TILE.block_m,
                block_n=TILE.block_n, metric=metric, level=level, value=value, unit="B", tool=tool,
            )  # fmt: skip


EXPERIMENT = Experiment(
    name=NAME,
    title="SM boundary against HBM",
    cells=cells,
    predict=predict,
    also=also,
)
