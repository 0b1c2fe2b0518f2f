"""Where Hopper's forward pays for packed sequences: predicted times for published lengths.

``python -m repro.timing.packed_time`` writes the table of ``docs/pages/packed.md`` for an H200, a
batch of each dataset of ``repro.measuring.lengths``. Both forms are predicted from their machine
code: Hopper's by ``kernels.timing.hopper_packed_time``, the sm_80 form, compiled for sm_90, by the
model of an SM that runs products of warps (``analysis.loop_model.hopper_warps``). Its clocks are
kept in ``kernels/timing/packed_sm80_lines.csv`` with a digest of the source. Under a minute.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from tabulate import tabulate

from analysis.hardware import H200
from analysis.loop_model import card, hopper_warps
from analysis.loop_model.program import Program
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from analysis.sums.packed import ENTRY_BYTES
from kernels.building.compile import nvrtc_version
from kernels.flash_config import FlashConfig, configure
from kernels.launches import Device, launches_of
from kernels.launching.plan import Launch
from kernels.pages import Block
from kernels.sass import loops
from kernels.timing.ampere_time import COLUMN, ROUNDS, SHARED_ROUNDS, Recorded, digest_of, follow
from kernels.timing.followed_blocks import code_of, launch_of
from kernels.timing.hopper_packed_time import LINES as HOPPER_LINES
from kernels.timing.hopper_time import seconds_around
from repro import cli
from repro.measuring.lengths import LIMITS, drawn
from repro.prediction import predict

BLOCK = Block("packed.md", "hopper", "repro.timing.packed_time")
LINES = HOPPER_LINES.with_name("packed_sm80_lines.csv")
SEQUENCES, HEADS, DTYPE, HEAD_DIMS, ARCH = 64, 16, "fp16", (64, 128), "sm_90"
DEVICE = Device("90", H200.shared_bytes_per_block, H200.sms)


def batch(dataset: str, head_dim: int, causal: bool) -> tuple[AttentionShape, Lengths]:
    """The packed arrays of ``SEQUENCES`` drawn sequences, and their lengths."""
    lengths = Lengths.equal(drawn(dataset, SEQUENCES))
    some = AttentionShape(1, HEADS, 1, 1, head_dim, dtype=DTYPE, causal=causal)
    return lengths.packed_shape(some), lengths


def main_launch(shape: AttentionShape, lengths: Lengths) -> Launch:
    """Of the sm_80 forward."""
    return launches_of("flash", shape, "forward", DEVICE, lengths=lengths).main


def followed(head_dim: int, causal: bool, rounds: int) -> Program:
    """Block 0 of one head of one packed sequence, whose loop has so many rounds."""
    some = AttentionShape(1, 1, 1, 1, head_dim, dtype=DTYPE, causal=causal)
    block_n = config(head_dim, causal).tile.block_n
    lengths = Lengths.equal([rounds * block_n])
    main = main_launch(lengths.packed_shape(some), lengths)
    # Both tables, which hold the same, lie where the lower half of an address is 0.
    memory = {ENTRY_BYTES * at: start for at, start in enumerate(lengths.tables[0])}
    launch = replace(launch_of(main), architecture=ARCH, memory=memory)
    return loops.program(code_of(main.kernel, ARCH), launch)


def config(head_dim: int, causal: bool) -> FlashConfig:
    """What the sm_80 forward runs with on this card."""
    return configure(
        "forward", DTYPE, head_dim, causal=causal, packed=True, limit=H200.shared_bytes_per_block
    )


@cache
def _rows() -> dict[str, dict[str, str]]:
    with LINES.open(encoding="utf-8") as file:
        return {row["digest"]: row for row in csv.DictReader(file)}


def of_sm80(shape: AttentionShape, lengths: Lengths) -> float:
    """Predicted seconds of the sm_80 forward: its blocks, those without rows left out.

    Raises LookupError for another state of its source than the recorded one.
    """
    row = _rows().get(digest_of(main_launch(shape, lengths).kernel))
    if row is None:
        raise LookupError(
            f"another source than in {LINES.name}: python -m repro.timing.packed_time"
        )
    found = Recorded.read(row)
    clocks = found.clocks(rounds(found, shape, lengths), H200.sms)
    around = seconds_around("forward", shape, 1, H200.hbm_bandwidth_bytes_per_s)
    return clocks / card.H200_SUSTAINED.hz + around


def rounds(found: Recorded, shape: AttentionShape, lengths: Lengths) -> Iterator[int]:
    """Key tiles of every block with rows, in the order they start: sequence after sequence, head
    after head, under a mask the longest first."""
    block_m, block_n = found.tile.block_m, found.tile.block_n
    for queries, keys in zip(lengths.queries, lengths.keys, strict=True):
        tiles = range(-(-queries // block_m))
        of_head = [keys] * len(tiles)
        if shape.causal:
            of_head = [
                min(keys, max(0, min((i + 1) * block_m, queries) + keys - queries))
                for i in reversed(tiles)
            ]
        for _ in range(shape.heads):
            yield from (-(-seen // block_n) for seen in of_head)


def times() -> Iterator[tuple[str, int, bool, float, float]]:
    """Dataset, head dimension, causal, and seconds of the Hopper form and of the sm_80 form."""
    for dataset, head_dim, causal in product(LIMITS, HEAD_DIMS, (False, True)):
        shape, lengths = batch(dataset, head_dim, causal)
        hopper = predict("flash-sm90", shape, "forward", H200, lengths=lengths).predicted_s
        assert hopper is not None, "python -m kernels.timing.hopper_packed_time first"
        yield dataset, head_dim, causal, hopper, of_sm80(shape, lengths)


def table() -> str:
    """The page's table."""
    headers = ("lengths", "head dimension", "mask", "Hopper form", "sm_80 form", "ratio")
    rows = [
        (dataset, head_dim, "causal" if causal else "none", f"{1e6 * hopper:.0f} µs",
         f"{1e6 * sm80:.0f} µs", f"{sm80 / hopper:.2f}")
        for dataset, head_dim, causal, hopper, sm80 in times()
    ]  # fmt: skip
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)


def record_lines() -> None:
    """The clocks of the sm_80 form's blocks."""
    columns = ("head_dim", "causal", "block_m", "block_n", "nvrtc", "digest", "blocks_per_sm",
               "slowdown", *(f"{COLUMN}{n}" for n in ROUNDS))  # fmt: skip
    with LINES.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for head_dim, causal in product(HEAD_DIMS, (False, True)):
            form = config(head_dim, causal)
            programs = {n: followed(head_dim, causal, n) for n in ROUNDS}
            blocks = form.fit(H200).blocks_per_sm
            writer.writerow({
                "head_dim": head_dim, "causal": causal, "block_m": form.tile.block_m,
                "block_n": form.tile.block_n, "nvrtc": nvrtc_version(),
                "digest": digest_of(form.kernel()),
                **follow(programs, SHARED_ROUNDS, blocks, hopper_warps.MACHINE),
            })  # fmt: skip
    _rows.cache_clear()


def main() -> None:
    """Records the clocks and writes the page's table."""
    record_lines()
    BLOCK.write(table())


if __name__ == "__main__":
    sys.exit(cli.program(main))
