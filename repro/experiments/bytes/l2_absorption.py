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
from analysis.shapes import AttentionShape, Tile
from analysis.traffic import predict_traffic
from repro.experiments import Cell, Context, Experiment
from repro.experiments.shared.profiled import Profiled, seconds_of
from repro.experiments.shared.pytorch_runs import SOURCES, cell, counter_rows
from repro.instruments.counters import KernelCount
from repro.measuring.records import Record, record

NAME = "l2-absorption"
TILE = Tile(128, 64)
BLOCKS_PER_SM = 2
#: (heads, N) on record.
MEASURED = ((1, 32768), (1, 65536), (1, 131072), (1, 262144), (4, 131072))
SEQLENS = tuple(sorted({128 * round(2 ** (k / 8) * 8) for k in range(8 * 9 + 1)}))


def cells() -> list[Cell]:
    """The framework's forward, long enough for K and V to outgrow L2."""
    return [
        cell("sdpa-flash2", "forward", batch=1, heads=heads, seqlen=n, head_dim=128, dtype="bf16")
        for heads, n in MEASURED
    ]


def predict(one: Cell) -> list[Record]:
    """The curves are in ``also``."""
    return []


@cache
def counted() -> Profiled[KernelCount]:
    """The counters of this process' run."""
    from repro.instruments.counted import count_cells

    return Profiled(cells(), count_cells, batch=len(MEASURED), limit_s=60.0)


def measure(one: Cell, context: Context) -> list[Record]:
    """Both levels, reads and writes, of the one kernel that runs."""
    return counter_rows(NAME, one, counted().kernels(one))


def also() -> Iterator[Record]:
    """Both levels, reads only: one head at every length, four heads at one."""
    for heads, seqlen in dict.fromkeys([*((1, n) for n in SEQLENS), *MEASURED]):
        shape = AttentionShape(1, heads, seqlen, seqlen, 128, dtype="bf16")
        traffic = predict_traffic("flash", shape, TILE, "forward")
        hbm = predict_hbm("flash", shape, TILE, "forward", H200, BLOCKS_PER_SM)
        spread: dict[str, Any] = {}
        if (heads, seqlen) in MEASURED and hbm.method == SIMULATED:
            low, high = read_spread("flash", shape, TILE, "forward", H200, BLOCKS_PER_SM)
            spread = {"spread_min": low, "spread_max": high, "spread_n": len(PACES)}
        values = {
            "sram_read_bytes": ("sm", traffic.read_bytes, "sum over the tile loop", {}),
            "hbm_read_bytes": ("hbm", hbm.read_bytes, hbm.method, spread),
            "hbm_compulsory_bytes": ("hbm", compulsory_hbm(traffic, shape).read_bytes, "each tensor once", {}),
        }
        for metric, (level, value, tool, more) in values.items():
            yield record(
                {},
                experiment=NAME,
                implementation="flash",
                pass_="forward",
                source="predicted",
                batch=1,
                heads=heads,
                kv_heads=heads,
                seqlen_q=seqlen,
                seqlen_k=seqlen,
                head_dim=128,
                dtype="bf16",
                causal=False,
                block_m=TILE.block_m,
                block_n=TILE.block_n,
                metric=metric,
                level=level,
                value=value,
                unit="B",
                tool=tool,
                **more,
            )


EXPERIMENT = Experiment(
    name=NAME,
    title="SM boundary against HBM",
    cells=cells,
    predict=predict,
    measure=measure,
    device="cuda",
    also=also,
    sources=SOURCES,
    seconds=seconds_of(len(MEASURED), len(MEASURED)),
)
