"""FlashAttention 2022, Fig. 2 middle: memory accesses against the column block size Bc.

Forward, N = 1024, d = 64, 16 heads, batch 64, fp16. Br is 16, as in the released kernels (it does
not enter the count). Two forms are executed: the one whose first pass reads nothing back,
(3 Tc + 1) N d elements with Tc = N / Bc, which fits the printed points, and the released code's,
(5 Tc - 1) N d, which does not. Row statistics are rows of their own here.
"""

from collections.abc import Iterator

from analysis.flops import useful_flops
from analysis.hardware import A100_40GB
from analysis.shapes import Tile
from analysis.traffic import predict_traffic
from repro.experiments import Cell, Experiment, Row, row
from repro.experiments.shared.attention import STATISTICS, cell, predicted_traffic, shape_of, tile_of
from repro.experiments.shared.host import counted_traffic

COLUMN_BLOCKS = (64, 128, 256, 512)
FORMS = ("flash1-skip-first", "flash1-released")


def cells() -> list[Cell]:
    """One forward pass per form and column block."""
    return [
        cell(form, "forward", Tile(16, bc), seqlen=1024, head_dim=64, batch=64, heads=16)
        for form in FORMS
        for bc in COLUMN_BLOCKS
    ]


def predict(one: Cell) -> Iterator[Row]:
    """The exact sums, and the paper's argument about time: accesses over bandwidth, products over
    peak rate."""
    yield from predicted_traffic(one)
    if one["implementation"] != FORMS[0]:
        return
    shape = shape_of(one)
    by_tensor = predict_traffic(FORMS[0], shape, tile_of(one), "forward").by_tensor()
    accesses = sum(n for (tensor, _), n in by_tensor.items() if tensor not in STATISTICS)
    bounds = {
        "accesses": accesses / A100_40GB.hbm_bandwidth_bytes_per_s,
        "products": useful_flops(shape, "forward") / A100_40GB.fp16_tensor_flops,
    }
    for bound, seconds in bounds.items():
        yield row("time_ms", seconds * 1e3, bound=bound, device=f"NVIDIA {A100_40GB.name}", tool="datasheet rate")


EXPERIMENT = Experiment("fig2-middle", cells, predict, counted_traffic, device="host", seconds=20)
