"""Cells of PyTorch's own attention at the shapes of the papers' runs, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from repro.experiments import Cell
from repro.instruments.counters import METRICS, KernelCount
from repro.measuring.records import Record, record

EAGER, CHECKPOINTED = "standard-eager", "standard-eager-checkpointed"
FUSED = ("sdpa-flash2", "sdpa-efficient", "sdpa-cudnn")
#: What runs them.
SOURCES = ("repro/instruments/pytorch_attention.py",)
#: Of FlashAttention 2022, Fig. 3: where the score matrix fits, and beyond.
DENSE, LONG = tuple(2**k for k in range(7, 14)), (16384, 32768)


def cell(
    implementation: str,
    pass_: str,
    *,
    batch: int,
    heads: int,
    seqlen: int,
    head_dim: int = 64,
    dtype: str = "fp16",
    masked: bool = False,
) -> Cell:
    """A pass; ``masked``: with a mask of padded keys and dropout 0.1."""
    return Cell(
        implementation=implementation,
        pass_=pass_,
        batch=batch,
        heads=heads,
        kv_heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        dtype=dtype,
        causal=False,
        dropout=0.1 if masked else 0.0,
        key_mask=masked,
    )


def fig3_cells() -> list[Cell]:
    """Fig. 3's runs on a card of today: eager attention with and without mask and dropout, under a
    checkpoint, and the framework's fused kernels, which are asked for longer sequences too."""
    shape: dict[str, Any] = {"batch": 16, "heads": 8}
    both = "forward+backward"
    dense = [cell(EAGER, both, seqlen=n, masked=m, **shape) for n in DENSE for m in (False, True)]
    dense += [cell(CHECKPOINTED, both, seqlen=n, **shape) for n in DENSE]
    return dense + [cell(name, both, seqlen=n, **shape) for n in (*DENSE, *LONG) for name in FUSED]


def timed(experiment: str, one: Cell, works: dict[str, Any], budget_ms: float = 60.0) -> list[Record]:
    """A row of milliseconds for each pass (or operation) of a cell, timed in turn."""
    from repro.instruments.timing import TorchDevice, time_interleaved

    times = time_interleaved(works, TorchDevice(), budget_ms=budget_ms)
    return [
        record(
            one,
            experiment=experiment,
            source="measured",
            pass_=name,
            metric="time_ms",
            unit="ms",
            value=timing.median_ms,
            spread_min=timing.min_ms,
            spread_max=timing.max_ms,
            spread_n=timing.repeats,
            tool="CUDA events, median, in turn, L2 flushed",
        )
        for name, timing in times.items()
    ]


def counter_rows(experiment: str, one: Cell, kernels: Sequence[KernelCount], *, each: bool = False) -> list[Record]:
    """Bytes by level and direction, of a cell's kernels together or each."""
    groups = [(f"{i}: {kernel.name}", [kernel]) for i, kernel in enumerate(kernels)] if each else [(None, kernels)]
    names = {"hbm": "hbm", "sm": "sram"}
    return [
        record(
            one,
            experiment=experiment,
            source="measured",
            kernel=name,
            level=level,
            metric=f"{names[level]}_{direction}_bytes",
            unit="B",
            value=sum(kernel.bytes[level, direction] for kernel in some),
            tool="ncu --clock-control none, default cache control",
        )
        for name, some in groups
        for level, direction in METRICS
    ]
