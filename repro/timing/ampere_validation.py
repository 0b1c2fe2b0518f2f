"""What the model of time says of an A100 beside what FlashAttention-2 published for one.

Of FlashAttention-2's own kernels, from the machine code in torch's wheel
(``repro.timing.flash2_time``), and of ours (``kernels.timing.sm80_time``). Published are 24
labels of a figure, forward and backward together, and 8 end points of two more, read by others
(``results/published/throughput.jsonl``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from analysis.flops import paper_flops
from analysis.hardware import find_gpu
from analysis.loop_model.card import Clock
from analysis.shapes import AttentionShape
from kernels.timing import sm80_time
from kernels.timing.sm80_time import ON_A100
from repro.measuring.records import Record, load
from repro.timing import flash2_time

PUBLISHED = "flash2"
GPU = flash2_time.GPU
CLOCK = Clock(GPU.boost_clock_hz, "boost clock of the datasheet")


@dataclass(frozen=True)
class Point:
    """TFLOP/s: as published, and predicted of FlashAttention-2's machine code and of ours."""

    pass_: str
    head_dim: int
    causal: bool
    seqlen: int
    published: float
    theirs: float
    ours: float


def points(rows: Iterable[Record] | None = None) -> list[Point]:
    """Every published number of an A100. LookupError where ours are not on record."""
    rows = load(("throughput",), local=False) if rows is None else rows
    return [
        point(
            str(row.pass_),
            row.batch or 0,
            row.heads or 0,
            row.seqlen_q or 0,
            row.head_dim or 0,
            bool(row.causal),
            float(row.value),
        )
        for row in rows
        if row.source == "published"
        and row.implementation == PUBLISHED
        and row.value is not None
        and find_gpu(str(row.device)) == GPU
    ]


def point(pass_: str, batch: int, heads: int, seqlen: int, head_dim: int, causal: bool, published: float) -> Point:
    """A published number of fp16 beside what is predicted. pass_: one, or two with a plus."""
    shape = AttentionShape(batch, heads, seqlen, seqlen, head_dim, dtype="fp16", causal=causal)
    passes = pass_.split("+")
    flops = sum(paper_flops(shape, each) for each in passes) / 1e12
    theirs = sum(flash2_time.seconds(each, shape) for each in passes)
    mine = sum(ours(each, shape) for each in passes)
    return Point(pass_, head_dim, causal, seqlen, published, flops / theirs, flops / mine)


def ours(pass_: str, shape: AttentionShape) -> float:
    """Seconds of our kernels that run on an A100 by default."""
    main = sm80_time.main_launch(shape, pass_, ON_A100)
    return sm80_time.seconds(
        main.kernel, pass_, shape, ON_A100, sms=GPU.sms, hbm_bytes_per_s=GPU.hbm_bandwidth_bytes_per_s, clock=CLOCK
    )


def errors(ratios: Sequence[float]) -> tuple[float, float]:
    """Median and worst of |predicted / published - 1| of rates."""
    found = [abs(ratio - 1) for ratio in ratios]
    return median(found), max(found)


def table() -> str:
    """Median and worst error by head dimension, as a Markdown table."""
    found = points()
    lines = ["| | FA-2's code: median | worst | ours: median | worst |", "|---|---|---|---|---|"]
    for head_dim in flash2_time.HEAD_DIMS:
        of = [p for p in found if p.head_dim == head_dim]
        cells = [
            f"{100 * error:.1f} %"
            for rates in ([p.theirs for p in of], [p.ours for p in of])
            for error in errors([rate / p.published for rate, p in zip(rates, of, strict=True)])
        ]
        lines.append(f"| d = {head_dim} | {' | '.join(cells)} |")
    return "\n".join(lines)
