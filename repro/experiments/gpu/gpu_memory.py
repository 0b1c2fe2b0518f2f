"""Peak memory of one forward and backward pass against sequence length, on a GPU.

The configuration of FlashAttention 2022, Fig. 3 right (B = 16, 8 heads, d = 64, fp16, no mask, no
dropout) for our operator and the variants it is compared with. The peak is what the two pools
(torch's and CuPy's) had handed out, above what was alive before; what was asked for and what they
held from the driver are rows of their own.
"""

from __future__ import annotations

from kernels import attention
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, shape_of

VARIANTS = ("flash", "flash-deterministic", "chunked", "standard", "standard-checkpointed")
SEQLENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def cells() -> list[Cell]:
    """Every variant at every length; those that run out of memory become rows that say so."""
    return [
        cell(name, "forward+backward", seqlen=n, head_dim=64, batch=16, heads=8)
        for n in SEQLENS
        for name in VARIANTS
        if n <= 16384 or name in attention.FLASH
    ]


def measure(one: Cell, context: Context) -> list[Row]:
    """Peak above the operands' own memory, operands included, as the paper counts."""
    import torch

    from repro.attention.variants import VARIANTS as RUN
    from repro.checkpointing import memory_meter
    from repro.instruments.gpu_work import Operands

    variant = RUN[str(one["implementation"])]
    torch.cuda.empty_cache()
    operands = leaves = None
    try:
        # Operands are made in fp32 first, so what is measured is the pass and what it starts from.
        with memory_meter("cuda") as meter:
            with meter.region("operands") as made:
                operands = Operands(shape_of(one))
                leaves = [t.requires_grad_() for t in (operands.q, operands.k, operands.v)]
            with meter.region("pass") as run:
                variant(*leaves).backward(operands.dout)
                torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise RuntimeError("out of memory") from None
    finally:
        operands = leaves = None
    assert made.rounded_end_bytes is not None
    assert run.rounded_peak_bytes is not None
    senses = {
        "peak_memory_bytes": (made.rounded_end_bytes + run.rounded_peak_bytes, "blocks handed out"),
        "requested_peak_bytes": (made.end_bytes + run.peak_bytes, "bytes asked for"),
        "reserved_peak_bytes": (run.reserved_peak_bytes, "held from the driver, all of it"),
    }
    return [row(metric, value, tool=f"torch's and CuPy's pools: {sense}") for metric, (value, sense) in senses.items()]


EXPERIMENT = Experiment("gpu-memory", cells, measure=measure, device="cuda", seconds=25)
