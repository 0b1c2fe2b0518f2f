"""Cells of PyTorch's own attention at the shapes of the papers' runs, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from repro.experiments import Cell, Row, row
from repro.experiments.shared.attention import cell
from repro.instruments.counters import METRICS, KernelCount

EAGER, CHECKPOINTED = "standard-eager", "standard-eager-checkpointed"
FUSED = ("sdpa-flash2", "sdpa-efficient", "sdpa-cudnn")
#: What runs them.
SOURCES = ("repro/instruments/pytorch_attention.py",)
#: Of FlashAttention 2022, Fig. 3: where the score matrix fits, and beyond.
DENSE, LONG = tuple(2**k for k in range(7, 14)), (16384, 32768)


def run(implementation: str, pass_: str, *, masked: bool = False, **shape: Any) -> Cell:
    """A pass; ``masked``: with a mask of padded keys and dropout 0.1."""
    return cell(implementation, pass_, dropout=0.1 if masked else 0.0, key_mask=masked, **shape)


def fig3_cells() -> list[Cell]:
    """Fig. 3's runs on a card of today: eager attention with and without mask and dropout, under a
    checkpoint, and the framework's fused kernels, which are asked for longer sequences too."""
    shape: dict[str, Any] = {"batch": 16, "heads": 8, "head_dim": 64}
    both = "forward+backward"
    dense = [run(EAGER, both, seqlen=n, masked=m, **shape) for n in DENSE for m in (False, True)]
    dense += [run(CHECKPOINTED, both, seqlen=n, **shape) for n in DENSE]
    return dense + [run(name, both, seqlen=n, **shape) for n in (*DENSE, *LONG) for name in FUSED]


def timed(works: Mapping[str, Callable[[], object]], budget_ms: float = 60.0) -> Iterator[Row]:
    """A row of milliseconds for each pass of a cell, timed in turn."""
    from repro.instruments.timing import IN_TURN, TorchDevice, time_interleaved

    for name, timing in time_interleaved(works, TorchDevice(), budget_ms=budget_ms).items():
        yield timing.row(IN_TURN, pass_=name)


def counter_rows(kernels: Sequence[KernelCount], *, each: bool = False) -> Iterator[Row]:
    """Bytes by level and direction, of a cell's kernels together or each."""
    names, tool = {"hbm": "hbm", "sm": "sram"}, "ncu --clock-control none, default cache control"
    groups = [(f"{i}: {kernel.name}", [kernel]) for i, kernel in enumerate(kernels)] if each else [(None, kernels)]
    for name, some in groups:
        for level, direction in METRICS:
            value = sum(kernel.bytes[level, direction] for kernel in some)
            yield row(f"{names[level]}_{direction}_bytes", value, level=level, kernel=name, tool=tool)
