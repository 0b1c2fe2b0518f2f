"""FlashAttention-2's forwards on Hopper in clocks, where no clock rate is needed.

Four small problems, counted with Nsight Compute on an H100 and published with FlashGPU-Sim
(``results/published/fa2-clocks.jsonl``), beside the model on the machine code in torch's wheel
(``repro.timing.flash2_time``). FlashGPU-Sim timed a build of its own of the same kernels.

``python -m repro.timing.flash2_clocks`` writes the table of docs/pages/time.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from analysis.shapes import AttentionShape
from kernels.pages import Block
from repro import cli
from repro.measuring.records import load
from repro.timing import flash2_time

EXPERIMENT = "fa2-clocks"
BLOCK = Block("time.md", "fa2-clocks", "repro.timing.flash2_clocks")


@dataclass(frozen=True)
class Point:
    """Clocks of a launch, as counted and as predicted."""

    shape: AttentionShape
    counted: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.counted


def points() -> list[Point]:
    """One a published count."""
    found = []
    for row in load((EXPERIMENT,), local=False):
        shape = AttentionShape(
            row.batch or 0, row.heads or 0, row.seqlen_q or 0, row.seqlen_k or 0,
            row.head_dim or 0, dtype=str(row.dtype), causal=bool(row.causal),
        )  # fmt: skip
        predicted = flash2_time.clocks("forward", shape, flash2_time.ON_H200)
        found.append(Point(shape, float(row.value or 0), predicted))
    return found


def table() -> str:
    """Counted and predicted clocks, as Markdown."""
    lines = ["| B, heads, N, d | counted | predicted | |", "|---|---|---|---|"]
    for point in points():
        s = point.shape
        mask = ", causal" if s.causal else ""
        lines.append(
            f"| {s.batch}, {s.heads}, {s.seqlen_q}, {s.head_dim}{mask} | {point.counted:,.0f} "
            f"| {point.predicted:,.0f} | {100 * (point.ratio - 1):+.1f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Writes the page's table."""
    BLOCK.write(table())


if __name__ == "__main__":
    sys.exit(cli.program(main))
