"""Times on an A100 that follow from machine code, registered before any card ran our kernels.

``results/registered/ampere-time.jsonl`` holds them, with date and commit (``repro.gpu.register``):
of our sm_80 kernels and of torch's FlashAttention-2, at the boost clock, no number fitted.
Agreement or disagreement is a result either way. On an A100 both take turns as in
``gpu-throughput``.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis.flops import paper_flops
from repro.experiments import Cell, Context, Experiment, UnavailableError
from repro.experiments.gpu.gpu_throughput import HIDDEN, TOKENS, measure_in_turn, seconds_of
from repro.experiments.shared.attention import shape_of
from repro.measuring.records import Record, record
from repro.timing import ampere_validation, flash2_time

NAME = "ampere-time"
OURS, PEER = "flash", "sdpa-flash"
SEQLENS = (16384, 2048, 512, 8192, 4096, 1024)


def cells() -> list[Cell]:
    """The paper's shapes: 16,384 tokens, hidden size 2,048, fp16."""
    return [
        Cell(
            pass_=pass_,
            batch=TOKENS // seqlen,
            heads=HIDDEN // head_dim,
            kv_heads=HIDDEN // head_dim,
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            head_dim=head_dim,
            dtype="fp16",
            causal=causal,
        )
        for seqlen in SEQLENS
        for head_dim in flash2_time.HEAD_DIMS
        for causal in (False, True)
        for pass_ in ("forward", "backward")
    ]


def registered() -> Iterator[Record]:
    """The predictions of all cells, to be written once (``repro.gpu.register``)."""
    for one in cells():
        shape, pass_ = shape_of(one), str(one["pass"])
        for name, seconds in ((OURS, ampere_validation.ours(pass_, shape)), (PEER, flash2_time.seconds(pass_, shape))):
            yield record(
                one,
                experiment=NAME,
                implementation=name,
                source="predicted",
                metric="throughput_tflops",
                unit="TFLOP/s",
                device=ampere_validation.GPU.name,
                value=paper_flops(shape, pass_) / seconds / 1e12,
                cell=one.id,
                tool=f"machine code at {ampere_validation.CLOCK.hz / 1e9:.2f} GHz, registered",
            )


def predict(one: Cell) -> list[Record]:
    """Nothing: what counts is what was registered."""
    return []


def measure(one: Cell, context: Context) -> list[Record]:
    """Both in turn, on an A100."""
    import torch

    if torch.cuda.get_device_capability() != (8, 0):
        raise UnavailableError("the registered times are of an A100, compute capability 8.0")
    return measure_in_turn(one, (OURS, PEER), NAME)


EXPERIMENT = Experiment(
    name=NAME,
    title="times on an A100 against predictions from machine code",
    cells=cells,
    predict=predict,
    measure=measure,
    device="cuda",
    seconds=seconds_of(cells(), lambda one: 2),
)
