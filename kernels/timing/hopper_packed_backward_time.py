"""Clocks and seconds of the Hopper backward on packed sequences, predicted from its machine code.

``python -m kernels.timing.hopper_packed_backward_time`` follows the first block of a small batch
through the model of an SM, as ``kernels.timing.hopper_time`` does for plain backwards, and a block
whose number has no rows, which returns after its search. ``hopper_packed_backward_lines.csv`` keeps
both with a digest of the source. The blocks of a batch, each with its own number of rounds, then
fill the card in the order in which they start.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from analysis.arguments import checked
from analysis.l2.attention import heads_per_group, launch_order
from analysis.loop_model import card
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from kernels import hopper
from kernels.building.cache import digest, headers
from kernels.building.compile import nvrtc_version
from kernels.command_line import program
from kernels.launch import ITEMSIZE
from kernels.launching.plan import Launch as Recorded
from kernels.launching.plan import Recorder
from kernels.packed import Packed
from kernels.sass import loops
from kernels.timing.followed_blocks import (
    DTYPE,
    HEADS,
    ROUNDS,
    Single,
    clocks_of,
    code_of,
    launch_of,
    stand_in,
)
from kernels.timing.hopper_packed_time import EMPTY, SEQUENCES, TABLES_AT, memory_of
from kernels.timing.hopper_time import seconds_around

LINES = Path(__file__).with_name("hopper_packed_backward_lines.csv")
RECORDS = "python -m kernels.timing.hopper_packed_backward_time records it"


def forms() -> list[hopper.BackwardForm]:
    """The forms that packed sequences run with, one for each head dimension."""
    return [
        hopper.backward_form(head_dim, False, featured=True)
        for head_dim in hopper.HEAD_DIMS["backward"]
    ]


@cache
def _recorded() -> dict[tuple[str, str], dict[str, str]]:
    with LINES.open(encoding="utf-8") as file:
        return {(row["form"], row["causal"]): row for row in csv.DictReader(file)}


def digest_of(form: hopper.BackwardForm, causal: bool) -> str:
    """Of all that the main kernel's machine code follows from, but for the compiler."""
    kernel = form.kernel("", DTYPE, causal, packed=True)
    return digest(kernel.text(), headers(kernel.text()), repr(kernel.macros))[:16]


def _row(form: hopper.BackwardForm, causal: bool) -> dict[str, str]:
    """LookupError when nothing is recorded for the form, or for another state of its source."""
    row = _recorded().get((form.name, str(causal)))
    if row is None:
        raise LookupError(f"no clocks on record for the packed backward {form.name}: {RECORDS}")
    if row["digest"] != digest_of(form, causal):
        raise LookupError(f"the source of the packed backward {form.name} has changed: {RECORDS}")
    return row


@checked
def clocks(form: hopper.BackwardForm, shape: AttentionShape, lengths: Lengths, sms: int) -> float:
    """Clocks of the main kernel on a card of ``sms`` multiprocessors.

    shape: of the packed arrays, (1, H, total, D). Raises LookupError when the form's clocks are not
    on record.
    """
    row = _row(form, shape.causal)
    line = card.through([(float(n), float(row[f"clocks_{n}"])) for n in ROUNDS])
    empty = float(row["empty"])
    walked = rounds(form, shape, lengths)
    return card.fill((empty if n == EMPTY else line(max(n, 1)) for n in walked), sms)


@checked
def seconds(
    form: hopper.BackwardForm,
    shape: AttentionShape,
    lengths: Lengths,
    *,
    sms: int,
    hbm_bytes_per_s: float,
    clock: card.Clock = card.H200_SUSTAINED,
) -> float:
    """Time of the backward, the two kernels around the main one included. Errors as
    :func:`clocks`."""
    main = clocks(form, shape, lengths, sms) / clock.hz
    return main + seconds_around("backward", shape, 1, hbm_bytes_per_s)


def rounds(form: hopper.BackwardForm, shape: AttentionShape, lengths: Lengths) -> list[int]:
    """Query tiles that each block walks, of all heads of its group, in the order blocks start;
    ``EMPTY`` of a number without rows."""
    block_m, block_n = form.tile.block_m, form.tile.block_n
    starts = np.array(lengths.tables[1])
    first = starts // block_n + np.arange(len(starts))
    number = np.arange(lengths.numbered_tiles(block_n, keys=True))
    sequence = np.searchsorted(first, number, side="right") - 1
    queries = np.array(lengths.queries)[sequence]
    keys = np.array(lengths.keys)[sequence]
    key = (number - first[sequence]) * block_n
    row = np.maximum(0, key - (keys - queries)) if shape.causal else np.zeros_like(key)
    visits = np.maximum(0, -(-queries // block_m) - row // block_m)
    walked = np.where(key < keys, shape.group * visits, EMPTY)
    row_bytes = shape.head_dim * (2 * shape.itemsize + ITEMSIZE["fp32"])
    side_by_side = heads_per_group(shape.kv_heads, shape.group * lengths.longest_q * row_bytes)
    _, place = launch_order(shape.kv_heads, len(number), side_by_side)
    found: list[int] = walked[place].tolist()
    return found


def follow(form: hopper.BackwardForm, causal: bool) -> dict[str, int]:
    """The columns of a record that come from the model."""
    found = {}
    for wanted in ROUNDS:
        recorded, memory, walked = _batch(form, causal, wanted * form.block_m)
        assert walked[0] == wanted
        found[f"clocks_{wanted}"] = round(_clocks(recorded, memory, 0))
    return {"empty": round(_clocks(recorded, memory, walked.index(EMPTY))), **found}


def _clocks(recorded: Recorded, memory: dict[int, int], block: int) -> float:
    launch = replace(launch_of(recorded), memory=memory, block=(block, 0, 0))
    return clocks_of(loops.program(code_of(recorded.kernel), launch))


def _batch(
    form: hopper.BackwardForm, causal: bool, length: int
) -> tuple[Recorded, dict[int, int], list[int]]:
    """The main launch for equal sequences, the words of its tables by address, and the rounds of
    its blocks."""
    lengths = Lengths.equal([length] * SEQUENCES)
    shape = AttentionShape(
        1, HEADS, lengths.total_q, lengths.total_k, form.head_dim, dtype=DTYPE, causal=causal
    )
    full = (1, HEADS, lengths.total_q, form.head_dim)
    names = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
    at = {name: stand_in(name, full, DTYPE, n) for n, name in enumerate(names, 1)}
    at["lse"] = stand_in("lse", full[:3], "fp32", len(names) + 1)
    tables = [
        replace(stand_in(f"cu_seqlens_{side}", (SEQUENCES + 1,), "int32", 0), pointer=where)
        for side, where in zip("qk", TABLES_AT, strict=True)
    ]
    recorder = Recorder(Single())
    hopper.backward(
        recorder, *(at[name] for name in names), scale=1.0, causal=causal, form=form,
        packed=Packed(tables[0], tables[1], lengths),
    )  # fmt: skip
    main = max(recorder.launches, key=lambda launch: launch.shared_bytes)
    return main, memory_of(lengths), rounds(form, shape, lengths)


def main() -> None:
    """Records the clocks of every form, bf16. Half a minute."""
    with LINES.open("w", newline="", encoding="utf-8") as file:
        columns = ("form", "causal", "nvrtc", "digest", "empty", *(f"clocks_{n}" for n in ROUNDS))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for form, causal in product(forms(), (False, True)):
            writer.writerow({
                "form": form.name, "causal": causal, "nvrtc": nvrtc_version(),
                "digest": digest_of(form, causal), **follow(form, causal),
            })  # fmt: skip
            file.flush()
    _recorded.cache_clear()


if __name__ == "__main__":
    sys.exit(program(main))
