"""Clocks and seconds of the Hopper forward on packed sequences, predicted from its machine code.

``python -m kernels.timing.hopper_packed_time`` follows a block of a small batch through the model
of an SM, as ``kernels.timing.hopper_time`` does for plain ones: clocks of a tile by the rounds of
its loop, what a block costs beside its tiles, and what a number without rows adds between two
tiles, whose search runs under the products of the one before. ``hopper_packed_lines.csv`` keeps
them with a digest of the source. The tiles of a batch, each with its own number of rounds, then
fill the card in the order of their numbers.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean

import numpy as np

from analysis.arguments import checked
from analysis.l2.attention import launch_order
from analysis.loop_model import card
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from analysis.sums.packed import ENTRY_BYTES
from kernels import hopper
from kernels.building.compile import nvrtc_version
from kernels.command_line import program
from kernels.hopper_packed import side_by_side
from kernels.launching.plan import Launch as Recorded
from kernels.launching.plan import Recorder
from kernels.packed import Packed
from kernels.sass import loops
from kernels.timing.followed_blocks import (
    DTYPE,
    HEADS,
    NEVER,
    ROUNDS,
    Single,
    clocks_of,
    code_of,
    launch_of,
    stand_in,
)
from kernels.timing.hopper_time import digest_of, seconds_around

LINES = Path(__file__).with_name("hopper_packed_lines.csv")
"""Recorded clocks, so that a prediction needs neither compiler nor disassembler."""
SEQUENCES = 64
"""Of the followed batch: three steps of the search."""
TABLES_AT = (0x10000, 0x20000)
"""Where its tables lie."""
EMPTY_BESIDE = 4
"""Rounds of the tiles between which numbers without rows are followed."""
EMPTY = -1
"""In the place of the rounds of a number without rows."""


@cache
def _recorded() -> dict[tuple[str, str], dict[str, str]]:
    with LINES.open(encoding="utf-8") as file:
        return {(row["form"], row["causal"]): row for row in csv.DictReader(file)}


def _row(form: hopper.ForwardForm, causal: bool) -> dict[str, str]:
    """LookupError when nothing is recorded for the form, or for another state of its source."""
    row = _recorded().get((form.name, str(causal)))
    again = "python -m kernels.timing.hopper_packed_time records it"
    if row is None:
        raise LookupError(f"no clocks on record for the forward {form.name}: {again}")
    if row["digest"] != digest_of(form, causal):
        raise LookupError(f"the source of the forward {form.name} has changed: {again}")
    return row


@checked
def clocks(form: hopper.ForwardForm, shape: AttentionShape, lengths: Lengths, sms: int) -> float:
    """Clocks of the kernel on a card of ``sms`` multiprocessors.

    shape: of the packed arrays, (1, H, total, D). Raises LookupError when the form's clocks are not
    on record.
    """
    row = _row(form, shape.causal)
    line = card.through([(float(n), float(row[f"clocks_{n}"])) for n in ROUNDS])
    empty = float(row["empty"])
    walked = rounds(form, shape, lengths)
    return float(row["beside"]) + card.fill(
        (empty if n == EMPTY else line(max(n, 1)) for n in walked), sms
    )


@checked
def seconds(
    form: hopper.ForwardForm,
    shape: AttentionShape,
    lengths: Lengths,
    *,
    sms: int,
    hbm_bytes_per_s: float,
    clock: card.Clock = card.H200_SUSTAINED,
) -> float:
    """Time of the forward. Errors as :func:`clocks`."""
    main = clocks(form, shape, lengths, sms) / clock.hz
    return main + seconds_around("forward", shape, 2, hbm_bytes_per_s)


def rounds(form: hopper.ForwardForm, shape: AttentionShape, lengths: Lengths) -> list[int]:
    """Key tiles that are walked for each number, in the order they are taken; ``EMPTY`` of one
    without rows."""
    block_m, block_n = form.tile.block_m, form.block_n
    starts = np.array(lengths.tables[0])
    first = starts // block_m + np.arange(len(starts))
    number = np.arange(lengths.numbered_tiles(block_m))
    sequence = np.searchsorted(first, number, side="right") - 1
    queries = np.array(lengths.queries)[sequence]
    keys = np.array(lengths.keys)[sequence]
    row = (number - first[sequence]) * block_m
    seen = keys
    if shape.causal:
        last = np.minimum(row + block_m, queries)
        seen = np.clip(last + keys - queries, 0, keys)
    walked = np.where(row < queries, -(-seen // block_n), EMPTY)
    group = side_by_side(shape.heads, lengths.longest_k, shape.head_dim * shape.itemsize)
    _, place = launch_order(shape.heads, len(number), group)
    found: list[int] = walked[len(number) - 1 - place if shape.causal else place].tolist()
    return found


def follow(form: hopper.ForwardForm, causal: bool) -> dict[str, int]:
    """The columns of a record that come from the model."""
    found, beside = {}, []
    for wanted in ROUNDS:
        few, more = (_clocks(form, causal, wanted, tiles) for tiles in (2, 4))
        found[f"clocks_{wanted}"] = round((more - few) / 2)
        beside.append(few - (more - few))
    between = [_clocks(form, causal, EMPTY_BESIDE, 4, empty) for empty in (0, 3)]
    return {
        "beside": round(max(0.0, mean(beside))),
        "empty": round(max(0.0, (between[1] - between[0]) / 3)),
        **found,
    }


def _clocks(
    form: hopper.ForwardForm, causal: bool, wanted: int, tiles: int, empty: int = 0
) -> float:
    """Of a block that takes tiles of so many rounds, and a number without rows behind each of the
    first ``empty``."""
    recorded, memory, walked = _batch(form, causal, wanted * form.block_n)
    first = walked.index(wanted)
    # Heads lie side by side: as many numbers of a kind follow each other.
    assert walked[first : first + HEADS] == [wanted] * HEADS
    nothing = walked.index(EMPTY) if empty else NEVER
    asked = []
    for tile in range(1, tiles):
        asked += [nothing] * (tile <= empty) + [first + tile]
    launch = replace(
        launch_of(recorded, [number - recorded.grid[0] for number in (*asked, NEVER)]),
        memory=memory, block=(first, 0, 0),
    )  # fmt: skip
    return clocks_of(loops.program(code_of(recorded.kernel), launch))


def _batch(
    form: hopper.ForwardForm, causal: bool, length: int
) -> tuple[Recorded, dict[int, int], list[int]]:
    """The launch for equal sequences, the words of its tables by address, and the rounds of its
    numbers."""
    lengths = Lengths.equal([length] * SEQUENCES)
    shape = AttentionShape(
        1, HEADS, lengths.total_q, lengths.total_k, form.head_dim, dtype=DTYPE, causal=causal
    )
    full = (1, HEADS, lengths.total_q, form.head_dim)
    q, k, v, out = (stand_in(name, full, DTYPE, n) for n, name in enumerate("qkvo", 1))
    lse = stand_in("lse", full[:3], "fp32", 5)
    tables = [
        replace(stand_in(f"cu_seqlens_{side}", (SEQUENCES + 1,), "int32", 0), pointer=at)
        for side, at in zip("qk", TABLES_AT, strict=True)
    ]
    recorder = Recorder(Single())
    hopper.forward(
        recorder, q, k, v, out, lse, scale=1.0, causal=causal, form=form,
        packed=Packed(tables[0], tables[1], lengths),
    )  # fmt: skip
    return recorder.launches[-1], memory_of(lengths), rounds(form, shape, lengths)


def memory_of(lengths: Lengths) -> dict[int, int]:
    """The words of the two tables, by address."""
    return {
        table + ENTRY_BYTES * at: start
        for table, starts in zip(TABLES_AT, lengths.tables, strict=True)
        for at, start in enumerate(starts)
    }


def main() -> None:
    """Records the clocks of every form, bf16. Half a minute."""
    with LINES.open("w", newline="", encoding="utf-8") as file:
        columns = ("form", "causal", "nvrtc", "digest", "beside", "empty",
                   *(f"clocks_{n}" for n in ROUNDS))  # fmt: skip
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for form, causal in product(hopper.PACKED_FORMS, (False, True)):
            writer.writerow({
                "form": form.name, "causal": causal, "nvrtc": nvrtc_version(),
                "digest": digest_of(form, causal), **follow(form, causal),
            })  # fmt: skip
            file.flush()
    _recorded.cache_clear()


if __name__ == "__main__":
    sys.exit(program(main))
