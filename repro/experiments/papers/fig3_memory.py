"""FlashAttention 2022, Fig. 3 right (Table 21): peak memory of forward + backward against N.

Batch 16, 8 heads, d = 64, fp16, no dropout, no mask. Predicted as sums of the tensors alive at the
peak, once for the paper's set-up (A100, 2022) and once for PyTorch 2.11's (H200).
"""

from collections.abc import Iterator

from analysis import memory
from analysis.shapes import AttentionShape
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell_of, shape_of
from repro.experiments.shared.pytorch_runs import SOURCES, fig3_cells

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
    """The total, where the cell names the set-up; what it consists of is in analysis.memory."""
    if "setup" not in one:
        return
    alive = PEAKS[str(one["implementation"]), str(one["setup"])](shape_of(one))
    yield row("peak_memory_bytes", memory.total(alive), tool="sum of the tensors alive")


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """The allocator's peak of both passes, operands and workspace included, as the paper counts."""
    import torch

    from repro.instruments.pytorch_attention import Attention

    torch.cuda.empty_cache()
    attention = Attention(one)
    try:
        attention.both()  # the matrix library's workspace stays, and counts as there before
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attention.both()
    except torch.OutOfMemoryError:
        raise RuntimeError("out of memory") from None
    torch.cuda.synchronize()
    peak, tool = torch.cuda.max_memory_allocated(), "torch.cuda.max_memory_allocated after reset"
    yield row("peak_memory_bytes", peak, allocated_before_bytes=before, tool=tool)


EXPERIMENT = Experiment(
    "fig3-memory", fig3_cells, predict, measure, device="cuda", also=points, sources=SOURCES, seconds=15
)
