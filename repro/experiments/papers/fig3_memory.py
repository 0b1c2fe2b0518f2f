"""FlashAttention 2022, Fig. 3 right (Table 21): peak memory of forward + backward against N.

Batch 16, 8 heads, d = 64, fp16, no dropout, no mask. Predicted as sums of the tensors alive at the
peak, once for the paper's set-up (A100, 2022) and once for PyTorch 2.11's (H200).
"""

from collections.abc import Iterator

from analysis import memory
from analysis.shapes import AttentionShape
from repro.experiments import Cell, Experiment
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


EXPERIMENT = Experiment(
    name=NAME, title="peak memory against N", cells=lambda: list[Cell](), predict=lambda cell: list[Record](), also=also
)
