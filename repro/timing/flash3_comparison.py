"""Our Hopper forwards, predicted at a locked clock, beside FlashAttention-3's published times.

24 times of an H100 at 1,500 MHz (``results/published/fa3-locked-clock.jsonl``). This compares two
kernels of like design and validates nothing; the model on FlashAttention-3's own code is
``repro.timing.flash3_time``.

``python -m repro.timing.flash3_comparison`` writes the table of docs/pages/time.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from statistics import median

from analysis.hardware import gpu_named
from analysis.loop_model.card import Clock
from analysis.shapes import AttentionShape, Tile
from kernels import hopper
from kernels.pages import Block
from kernels.timing import hopper_time
from repro import cli
from repro.measuring.records import Record, load

BLOCK = Block("time.md", "fa3", "repro.timing.flash3_comparison")
CLOCK = Clock(1.5e9, "locked for the published measurement")
#: FlashAttention-3's tiles, by head dimension and whether a causal mask is there. At d = 64 without
#: one the package that ``repro.timing.flash3_time`` reads has 192 x 192, which no form of ours has.
TILES = {
    (64, False): Tile(192, 128), (64, True): Tile(192, 128),
    (128, False): Tile(128, 176), (128, True): Tile(128, 128),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Microseconds: as published, of our form with the same tile, and of the one that runs."""

    seqlen: int
    head_dim: int
    causal: bool
    published: float
    same_tile: float
    default: float


def pairs() -> list[Pair]:
    """One a published time. LookupError where our clocks are not on record."""
    return [_pair(row) for row in load(("fa3-locked-clock",), local=False)]


def _pair(row: Record) -> Pair:
    assert row.head_dim is not None
    assert row.value is not None
    causal = bool(row.causal)
    shape = AttentionShape(
        row.batch or 0, row.heads or 0, row.seqlen_q or 0, row.seqlen_k or 0, row.head_dim,
        dtype="fp16", causal=causal,
    )  # fmt: skip
    gpu = gpu_named(str(row.device))

    def took(form: hopper.ForwardForm) -> float:
        bandwidth = gpu.hbm_bandwidth_bytes_per_s
        return 1e6 * hopper_time.seconds(
            form, shape, sms=gpu.sms, hbm_bytes_per_s=bandwidth, clock=CLOCK
        )

    return Pair(
        shape.seqlen_q,
        row.head_dim,
        causal,
        float(row.value),
        took(one_block_a_tile(row.head_dim, causal)),
        took(hopper.forward_form(row.head_dim, causal, shape.seqlen_q)),
    )


def one_block_a_tile(head_dim: int, causal: bool) -> hopper.ForwardForm:
    """Our form with FlashAttention-3's tile, with turns and without persistence."""
    (form,) = (
        form
        for form in hopper.FORWARD_FORMS
        if (form.head_dim, form.tile) == (head_dim, TILES[head_dim, causal])
        and form.pingpong
        and not form.persistent
        and not form.late_wait
    )
    return form


def table() -> str:
    """Predicted time over published time, as a Markdown table."""
    found = pairs()
    lines = [
        "| | times | our form with its tile: least | median | most | the form that runs: least "
        "| median | most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (head_dim, causal), tile in TILES.items():
        of = [pair for pair in found if (pair.head_dim, pair.causal) == (head_dim, causal)]
        cells = [
            f"{of_three(ratios):.2f}"
            for ratios in (
                [pair.same_tile / pair.published for pair in of],
                [pair.default / pair.published for pair in of],
            )
            for of_three in (min, median, max)
        ]
        mask = "causal" if causal else "no mask"
        name = f"d = {head_dim}, {tile.block_m} x {tile.block_n}, {mask}"
        lines.append(f"| {name} | {len(of)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Writes the page's table."""
    BLOCK.write(table())


if __name__ == "__main__":
    sys.exit(cli.program(main))
