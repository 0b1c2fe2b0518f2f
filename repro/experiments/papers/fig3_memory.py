"""FlashAttention 2022, Fig. 3 right (Table 21): peak memory of forward + backward against N.

Batch 16, 8 heads, d = 64, fp16, no dropout, no mask. Predicted as sums of the tensors alive at the
peak, once for the paper's set-up (A100, 2022) and once for PyTorch 2.11's (H200).
"""

from collections.abc import Iterator

from analysis import memory
from analysis.shapes import AttentionShape
from repro.experiments import Cell, Context, Experiment
from repro.experiments.shared.pytorch_runs import SOURCES, fig3_cells
from repro.measuring.records import Record, record

NAME = "fig3-memory"
SEQLENS = tuple(2**k for k in range(7, 17))
#: (implementation, set-up) -> the tensors alive at its peak.
PEAKS = {
    ("standard", "2022"): memory.standard_backward_peak_2022,
    ("flash1", "2022"): memory.flash1_backward_peak,
    ("standard-eager", "PyTorch 2.11"): memory.standard_backward_peak,
    ("sdpa-flash2", "PyTorch 2.11"): memory.flash2_pytorch_backward_peak,
    ("flash", "this package"): memory.flash_backward_peak,
}


def shape(seqlen: int) -> AttentionShape:
    """The benchmark's shape at one length."""
    return AttentionShape(16, 8, seqlen, seqlen, 64)


def also() -> Iterator[Record]:
    """One total per implementation and length; what it consists of is in analysis.memory."""
    for (implementation, setup), peak in PEAKS.items():
        for seqlen in SEQLENS:
            yield record(
                {},
                experiment=NAME,
                implementation=implementation,
                setup=setup,
                pass_="forward+backward",
                source="predicted",
                batch=16,
                heads=8,
                kv_heads=8,
                seqlen_q=seqlen,
                seqlen_k=seqlen,
                head_dim=64,
                dtype="fp16",
                causal=False,
                dropout=0.0,
                key_mask=False,
                metric="peak_memory_bytes",
                unit="B",
                value=memory.total(peak(shape(seqlen))),
                tool="sum of the tensors alive",
            )


def measure(one: Cell, context: Context) -> list[Record]:
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
    return [
        record(
            one,
            experiment=NAME,
            source="measured",
            metric="peak_memory_bytes",
            unit="B",
            value=torch.cuda.max_memory_allocated(),
            allocated_before_bytes=before,
            tool="torch.cuda.max_memory_allocated after reset",
        )
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="peak memory against N",
    cells=fig3_cells,
    predict=lambda cell: list[Record](),
    measure=measure,
    device="cuda",
    also=also,
    sources=SOURCES,
    seconds=15,
)
