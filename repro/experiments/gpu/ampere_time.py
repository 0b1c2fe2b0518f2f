"""Times on an A100 that follow from machine code, registered before any card ran our kernels.

``results/registered/ampere-time.jsonl`` holds them, with date and commit (``repro.gpu.register``):
of our sm_80 kernels and of torch's FlashAttention-2, at the boost clock, no number fitted.
Agreement or disagreement is a result either way. On an A100 both take turns as in
``gpu-throughput``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analysis.flops import paper_flops
from repro.experiments import Cell, Context, Experiment, Row, UnavailableError, row
from repro.experiments.gpu.gpu_throughput import measure_in_turn, of_tokens, seconds_of
from repro.experiments.shared.attention import shape_of
from repro.timing import ampere_validation, flash2_time

OURS, PEER = "flash", "sdpa-flash"
SEQLENS = (16384, 2048, 512, 8192, 4096, 1024)


def cells() -> list[Cell]:
    """The paper's shapes: 16,384 tokens, hidden size 2,048, fp16."""
    return [
        of_tokens(None, pass_, seqlen, head_dim, dtype="fp16", causal=causal, **_form(pass_, head_dim))
        for seqlen in SEQLENS
        for head_dim in flash2_time.HEAD_DIMS
        for causal in (False, True)
        for pass_ in ("forward", "backward")
    ]


def _form(pass_: str, head_dim: int) -> dict[str, Any]:
    """Registered cells without it are of the kernel before, of eight warps and two stages; no card
    had run it."""
    return {"form": "tiles in turn"} if (pass_, head_dim) == ("forward", 128) else {}


def registered(one: Cell) -> Iterator[Row]:
    """The predictions, to be written once (``repro.gpu.register``); what counts is what was."""
    shape, pass_, gpu = shape_of(one), str(one["pass"]), ampere_validation.GPU.name
    tool = f"machine code at {ampere_validation.CLOCK.hz / 1e9:.2f} GHz, registered"
    for name, seconds in ((OURS, ampere_validation.ours(pass_, shape)), (PEER, flash2_time.seconds(pass_, shape))):
        rate = paper_flops(shape, pass_) / seconds / 1e12
        yield row("throughput_tflops", rate, implementation=name, device=gpu, tool=tool)


def measure(one: Cell, context: Context) -> list[Row]:
    """Both in turn, on an A100."""
    import torch

    if torch.cuda.get_device_capability() != (8, 0):
        raise UnavailableError("the registered times are of an A100, compute capability 8.0")
    return measure_in_turn(one, (OURS, PEER))


EXPERIMENT = Experiment(
    "ampere-time", cells, measure=measure, device="cuda", seconds=seconds_of(cells(), lambda one: 2)
)
