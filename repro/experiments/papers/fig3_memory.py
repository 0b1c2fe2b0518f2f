"""FlashAttention 2022, Fig. 3 right (Table 21): peak memory of forward + backward against N.

Batch 16, 8 heads, d = 64, fp16, no dropout, no mask. Predicted as sums of the tensors alive at the
peak, once for the paper's set-up (A100, 2022) and once for PyTorch 2.11's (H200).
"""

from collections.abc import Iterator

from analysis import memory
from analysis.shapes import AttentionShape
from repro.experiments import Cell, Experiment, Row, row
from repro.experiments.shared.attention import cell_of, shape_of

SEQLENS = tuple(2**k for k in range(7, 17))
#: (implementation, set-up) -> the tensors alive at its peak.
PEAKS = {
    ("standard", "2022"): memory.standard_backward_peak_2022,
    ("flash1", "2022"): memory.flash1_backward_peak,
    ("standard-eager", "PyTorch 2.11"): memory.standard_backward_peak,
    ("sdpa-flash2", "PyTorch 2.11"): memory.flash2_pytorch_backward_peak,
    ("flash", "this package"): memory.flash_backward_peak,
}


def points() -> list[Cell]:
    """The benchmark's shape at every length."""
    shapes = [AttentionShape(16, 8, n, n, 64) for n in SEQLENS]
    return [
        cell_of(shape, implementation, "forward+backward", setup=setup, dropout=0.0, key_mask=False)
        for implementation, setup in PEAKS
        for shape in shapes
    ]


def predict(one: Cell) -> Iterator[Row]:
    """The total; what it consists of is in analysis.memory."""
    alive = PEAKS[str(one["implementation"]), str(one["setup"])](shape_of(one))
    yield row("peak_memory_bytes", memory.total(alive), tool="sum of the tensors alive")


EXPERIMENT = Experiment("fig3-memory", predict=predict, also=points)
