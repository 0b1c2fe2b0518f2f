"""The two traffic levels: what crosses the SM boundary, and what L2 lets through to HBM.

Measured on an H200 with hardware counters for PyTorch's FlashAttention-2 forward (bf16, d = 128,
query tiles of 128 rows, two thread blocks per SM). Predicted: the sum over the tile loop, and for
HBM the simulated L2 of ``analysis.l2``; its spread, at the lengths that were measured, is over what
nobody has published about the pace of thread blocks (``analysis.l2.PACES``).
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from analysis.hardware import H200
from analysis.hbm import SIMULATED, compulsory_hbm, predict_hbm, read_spread
from analysis.l2 import PACES
from analysis.shapes import Tile
from analysis.traffic import predict_traffic
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, shape_of
from repro.experiments.shared.profiled import Profiled, seconds_of
from repro.experiments.shared.pytorch_runs import SOURCES, counter_rows, run
from repro.instruments.counters import KernelCount

TILE = Tile(128, 64)
BLOCKS_PER_SM = 2
#: (heads, N) on record.
MEASURED = ((1, 32768), (1, 65536), (1, 131072), (1, 262144), (4, 131072))
SEQLENS = tuple(sorted({128 * round(2 ** (k / 8) * 8) for k in range(8 * 9 + 1)}))


def points() -> list[Cell]:
    """One head at every length, four heads at one."""
    listed = dict.fromkeys([*((1, n) for n in SEQLENS), *MEASURED])
    return [cell("flash", "forward", TILE, seqlen=n, head_dim=128, heads=heads, dtype="bf16") for heads, n in listed]


def predict(one: Cell) -> Iterator[Row]:
    """Both levels, reads only, of our own tile loop."""
    if one["implementation"] != "flash":
        return
    shape = shape_of(one)
    traffic = predict_traffic("flash", shape, TILE, "forward")
    hbm = predict_hbm("flash", shape, TILE, "forward", H200, BLOCKS_PER_SM)
    paces: dict[str, Any] = {}
    if (shape.heads, shape.seqlen_q) in MEASURED and hbm.method == SIMULATED:
        low, high = read_spread("flash", shape, TILE, "forward", H200, BLOCKS_PER_SM)
        paces = {"spread_min": low, "spread_max": high, "spread_n": len(PACES)}
    yield row("sram_read_bytes", traffic.read_bytes, level="sm", tool="sum over the tile loop")
    yield row("hbm_read_bytes", hbm.read_bytes, level="hbm", tool=hbm.method, **paces)
    once = compulsory_hbm(traffic, shape).read_bytes
    yield row("hbm_compulsory_bytes", once, level="hbm", tool="each tensor once")


def cells() -> list[Cell]:
    """The framework's forward, long enough for K and V to outgrow L2."""
    return [run("sdpa-flash2", "forward", seqlen=n, heads=heads, head_dim=128, dtype="bf16") for heads, n in MEASURED]


@cache
def counted() -> Profiled[KernelCount]:
    """The counters of this process' run."""
    from repro.instruments.counted import count_cells

    return Profiled(cells(), count_cells, batch=len(MEASURED), limit_s=60.0)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Both levels, reads and writes, of the one kernel that runs."""
    return counter_rows(counted().kernels(one))


EXPERIMENT = Experiment(
    "l2-absorption",
    cells,
    predict,
    measure,
    device="cuda",
    also=points,
    sources=SOURCES,
    seconds=seconds_of(len(MEASURED), len(MEASURED)),
)
