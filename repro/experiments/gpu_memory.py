"""Peak memory of one forward and backward pass against sequence length, on a GPU.

The configuration of FlashAttention 2022, Fig. 3 right (B = 16, 8 heads, d = 64, fp16, no mask, no
dropout) for our operator and the variants it is compared with. The peak is what the caching
allocator had handed out, above what was alive before; memory a second pool took is counted too.
"""

from __future__ import annotations

from repro.experiments import Cell, Context, Experiment
from repro.experiments._attention import shape_of
from repro.records import Record, record

NAME = "gpu-memory"
VARIANTS = ("flash", "flash-deterministic", "chunked", "standard", "standard-checkpointed")
SEQLENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def cells() -> list[Cell]:
    """Every variant at every length; those that run out of memory become rows that say so."""
    return [
        Cell(
            implementation=name, pass_="forward+backward", batch=16, heads=8, kv_heads=8,
            seqlen_q=n, seqlen_k=n, head_dim=64, dtype="fp16", causal=False,
        )
        for n in SEQLENS
        for name in VARIANTS
        if n <= 16384 or name.startswith("flash")
    ]  # fmt: skip


def predict(one: Cell) -> list[Record]:
    """The sums of live tensors belong to fig3-memory, whose figure shows these rows too."""
    return []


def measure(one: Cell, context: Context) -> list[Record]:
    """Peak above the operands' own memory, operands included, as the paper counts."""
    import torch

    from repro.attention.variants import VARIANTS as RUN
    from repro.instruments.gpu_work import Operands

    variant = RUN[str(one["implementation"])]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    second_before = _second_pool_bytes()
    torch.cuda.reset_peak_memory_stats()
    try:
        operands = Operands(shape_of(one))
        leaves = [t.requires_grad_() for t in (operands.q, operands.k, operands.v)]
        # Operands are made in fp32 first; the pass itself is what is measured.
        torch.cuda.reset_peak_memory_stats()
        variant(*leaves).backward(operands.dout)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise RuntimeError("out of memory") from None
    finally:
        peak = torch.cuda.max_memory_allocated() - before
        second = _second_pool_bytes() - second_before
        operands = leaves = None  # type: ignore[assignment]
    return [
        record(
            one, experiment=NAME, source="measured", metric="peak_memory_bytes",
            value=peak + second, unit="B", tool="caching allocator's peak, both pools",
        )
    ]  # fmt: skip


def _second_pool_bytes() -> int:
    """What CuPy's pool holds: torch's counters do not see it."""
    import cupy

    return int(cupy.get_default_memory_pool().total_bytes())


EXPERIMENT = Experiment(
    name=NAME,
    title="peak memory against sequence length",
    cells=cells,
    predict=predict,
    measure=measure,
    device="cuda",
    seconds=25,
)
