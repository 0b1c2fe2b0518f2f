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
from repro.experiments import Cell, Context, Experiment
from repro.experiments.shared.attention import STATISTICS, cell, predicted_traffic, shape_of, tile_of
from repro.measuring.records import Record, record

NAME = "fig2-middle"
COLUMN_BLOCKS = (64, 128, 256, 512)
FORMS = ("flash1-skip-first", "flash1-released")


def cells() -> list[Cell]:
    """One forward pass per form and column block."""
    return [
        cell(form, "forward", Tile(16, bc), seqlen=1024, head_dim=64, batch=64, heads=16)
        for form in FORMS
        for bc in COLUMN_BLOCKS
    ]


def predict(one: Cell) -> list[Record]:
    """The exact sums."""
    return list(predicted_traffic(NAME, one))


def also() -> Iterator[Record]:
    """The paper's argument about time: accesses over bandwidth, and products over peak rate."""
    for one in cells()[: len(COLUMN_BLOCKS)]:
        shape = shape_of(one)
        by_tensor = predict_traffic(FORMS[0], shape, tile_of(one), "forward").by_tensor()
        accesses = sum(n for (tensor, _), n in by_tensor.items() if tensor not in STATISTICS)
        bounds = {
            "accesses": accesses / A100_40GB.hbm_bandwidth_bytes_per_s,
            "products": useful_flops(shape, "forward") / A100_40GB.fp16_tensor_flops,
        }
        for bound, seconds in bounds.items():
            yield record(
                one,
                experiment=NAME,
                source="predicted",
                metric="time_ms",
                unit="ms",
                value=seconds * 1e3,
                bound=bound,
                device=f"NVIDIA {A100_40GB.name}",
                tool="datasheet rate",
            )


def measure(one: Cell, context: Context) -> list[Record]:
    """The kernel, executed and counted."""
    from repro.experiments.shared.host import counted_traffic

    return list(counted_traffic(NAME, one, context))


EXPERIMENT = Experiment(
    name=NAME,
    title="accesses against block size",
    cells=cells,
    predict=predict,
    measure=measure,
    device="host",
    also=also,
    seconds=20,
)
