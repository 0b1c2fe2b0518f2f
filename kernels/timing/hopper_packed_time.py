"""Clocks and seconds of the Hopper kernels on packed sequences, predicted from machine code.

``python -m kernels.timing hopper-packed`` follows a block of a small batch through the model
of an SM, as ``kernels.timing.hopper_time`` does for plain ones: clocks of a tile by the rounds of
its loop, and what a number without rows takes, which ends with its search. The forward's blocks
stay for many tiles, so that its search runs under the products of the tile before, and a block has
a cost beside its tiles. ``hopper_packed_lines.csv`` keeps them with a digest of the source. The
tiles of a batch, each with its own number of rounds, then fill the card in the order of their
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

import numpy as np

from analysis.arguments import checked
from analysis.l2.attention import heads_per_group, launch_order
from analysis.loop_model import card
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from analysis.sums.packed import ENTRY_BYTES
from kernels import hopper
from kernels.building.compile import nvrtc_version
from kernels.hopper_packed import side_by_side
from kernels.launch import ITEMSIZE
from kernels.launching.plan import Launch, Recorder
from kernels.packed import Packed
from kernels.sass import loops
from kernels.timing import hopper_time, records
from kernels.timing.followed_blocks import (
    DTYPE,
    HEADS,
    NEVER,
    ROUNDS,
    Form,
    Single,
    clocks_of,
    code_of,
    launch_of,
    stand_in,
)
from kernels.timing.hopper_time import pass_of
from kernels.timing.records import EMPTY, Recorded, clock_columns

LINES = Path(__file__).with_name("hopper_packed_lines.csv")
"""Recorded clocks, so that a prediction needs neither compiler nor disassembler."""
SEQUENCES = 64
"""Of the followed batch: three steps of the search."""
TABLES_AT = (0x10000, 0x20000)
"""Where its tables lie."""
EMPTY_BESIDE = 4
"""Rounds of the tiles between which the forward's numbers without rows are followed."""


def forms() -> list[Form]:
    """All that packed sequences run with."""
    backwards = [hopper.backward_form(head_dim, False, featured=True) for head_dim in hopper.HEAD_DIMS["backward"]]
    return [*hopper.PACKED_FORMS, *backwards]


def digest_of(form: Form, causal: bool) -> str:
    """Of all that the main kernel's machine code follows from, but for the compiler."""
    # Of a forward it is the form that is packed, of a backward the call.
    packed = ("packed",) if isinstance(form, hopper.BackwardForm) else ()
    return hopper_time.digest_of(form, causal, features=packed)


def recorded(form: Form, causal: bool) -> Recorded:
    """What is on record of a form.

    Raises LookupError when that is nothing, or of another state of its source.
    """
    pass_ = pass_of(form)
    row = records.find(LINES, **{"pass": pass_, "form": form.name, "causal": causal})
    again = "python -m kernels.timing hopper-packed records it"
    if row is None:
        raise LookupError(f"no clocks on record for the packed {pass_} {form.name}: {again}")
    if row["digest"] != digest_of(form, causal):
        raise LookupError(f"the source of the packed {pass_} {form.name} has changed: {again}")
    return Recorded.read(row)


@checked
def clocks(form: Form, shape: AttentionShape, lengths: Lengths, sms: int) -> float:
    """Clocks of the main kernel on a card of ``sms`` multiprocessors.

    shape: of the packed arrays, (1, H, total, D). Raises LookupError when the form's clocks are not
    on record.
    """
    return recorded(form, shape.causal).clocks(rounds(form, shape, lengths), sms)


@checked
def seconds(
    form: Form,
    shape: AttentionShape,
    lengths: Lengths,
    *,
    sms: int,
    hbm_bytes_per_s: float,
    clock: card.Clock = card.H200_SUSTAINED,
) -> float:
    """Time of the pass, the kernels around the main one included. Errors as :func:`clocks`."""
    main = clocks(form, shape, lengths, sms) / clock.hz
    pass_ = pass_of(form)
    launches = 2 if pass_ == "forward" else 1  # a forward sets its tile counter before
    return main + hopper_time.seconds_around(pass_, shape, launches, hbm_bytes_per_s)


def rounds(form: Form, shape: AttentionShape, lengths: Lengths) -> list[int]:
    """Tiles that are walked for each number, in the order they are taken: key tiles by a query
    tile, or query tiles of all heads of its group by a key tile; ``EMPTY`` of a number without
    rows."""
    backward = isinstance(form, hopper.BackwardForm)
    block_m, block_n = form.tile.block_m, form.tile.block_n
    step = block_n if backward else block_m
    starts = np.array(lengths.tables[backward])
    first = starts // step + np.arange(len(starts))
    number = np.arange(lengths.numbered_tiles(step, keys=backward))
    sequence = np.searchsorted(first, number, side="right") - 1
    queries = np.array(lengths.queries)[sequence]
    keys = np.array(lengths.keys)[sequence]
    row = (number - first[sequence]) * step
    if backward:
        seeing = np.maximum(0, row - (keys - queries)) if shape.causal else np.zeros_like(row)
        visits = shape.group * np.maximum(0, -(-queries // block_m) - seeing // block_m)
        walked = np.where(row < keys, visits, EMPTY)
        row_bytes = shape.head_dim * (2 * shape.itemsize + ITEMSIZE["fp32"])
        heads, group = shape.kv_heads, shape.group * lengths.longest_q * row_bytes
        _, place = launch_order(heads, len(number), heads_per_group(heads, group))
    else:
        seen = keys
        if shape.causal:
            last = np.minimum(row + block_m, queries)
            seen = np.clip(last + keys - queries, 0, keys)
        walked = np.where(row < queries, -(-seen // block_n), EMPTY)
        group = side_by_side(shape.heads, lengths.longest_k, shape.head_dim * shape.itemsize)
        _, place = launch_order(shape.heads, len(number), group)
        if shape.causal:
            place = len(number) - 1 - place
    found: list[int] = walked[place].tolist()
    return found


def follow(form: Form, causal: bool) -> dict[str, int]:
    """The columns of a record that come from the model."""
    if isinstance(form, hopper.BackwardForm):
        found = {f"clocks_{n}": round(_block(form, causal, n, n)) for n in ROUNDS}
        return {"beside": 0, "empty": round(_block(form, causal, ROUNDS[-1], EMPTY)), **found}
    found, beside = {}, []
    for wanted in ROUNDS:
        few, more = (_staying(form, causal, wanted, tiles) for tiles in (2, 4))
        found[f"clocks_{wanted}"] = round((more - few) / 2)
        beside.append(few - (more - few))
    between = [_staying(form, causal, EMPTY_BESIDE, 4, empty) for empty in (0, 3)]
    return {"beside": round(max(0.0, mean(beside))), "empty": round(max(0.0, (between[1] - between[0]) / 3)), **found}


def _block(form: hopper.BackwardForm, causal: bool, tiles: int, wanted: int) -> float:
    """Of a block with so many rounds, or without rows, among sequences of ``tiles`` query tiles."""
    launched, memory, walked = _batch(form, causal, tiles * form.block_m)
    launch = replace(launch_of(launched), memory=memory, block=(walked.index(wanted), 0, 0))
    return clocks_of(loops.program(code_of(launched.kernel), launch))


def _staying(form: hopper.ForwardForm, causal: bool, wanted: int, tiles: int, empty: int = 0) -> float:
    """Of a block that takes tiles of so many rounds, and a number without rows behind each of the
    first ``empty``."""
    launched, memory, walked = _batch(form, causal, wanted * form.block_n)
    first = walked.index(wanted)
    # Heads lie side by side: as many numbers of a kind follow each other.
    assert walked[first : first + HEADS] == [wanted] * HEADS
    nothing = walked.index(EMPTY) if empty else NEVER
    asked = []
    for tile in range(1, tiles):
        asked += [nothing] * (tile <= empty) + [first + tile]
    launch = replace(
        launch_of(launched, [number - launched.grid[0] for number in (*asked, NEVER)]),
        memory=memory,
        block=(first, 0, 0),
    )
    return clocks_of(loops.program(code_of(launched.kernel), launch))


def _batch(form: Form, causal: bool, length: int) -> tuple[Launch, dict[int, int], list[int]]:
    """The main launch for equal sequences, the words of its tables by address, and the rounds of
    its numbers."""
    lengths = Lengths.equal([length] * SEQUENCES)
    shape = AttentionShape(1, HEADS, lengths.total_q, lengths.total_k, form.head_dim, dtype=DTYPE, causal=causal)
    full = (1, HEADS, lengths.total_q, form.head_dim)
    names = ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv")
    at = {name: stand_in(name, full, DTYPE, n) for n, name in enumerate(names, 1)}
    at["lse"] = stand_in("lse", full[:3], "fp32", len(names))
    tables = [
        replace(stand_in(f"cu_seqlens_{side}", (SEQUENCES + 1,), "int32", 0), pointer=where)
        for side, where in zip("qk", TABLES_AT, strict=True)
    ]
    packed = Packed(tables[0], tables[1], lengths)
    recorder = Recorder(Single())
    if isinstance(form, hopper.BackwardForm):
        order = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
        hopper.backward(recorder, *(at[n] for n in order), scale=1.0, causal=causal, form=form, packed=packed)
    else:
        hopper.forward(recorder, *(at[n] for n in names[:5]), scale=1.0, causal=causal, form=form, packed=packed)
    memory = {
        table + ENTRY_BYTES * place: start
        for table, starts in zip(TABLES_AT, lengths.tables, strict=True)
        for place, start in enumerate(starts)
    }
    main = max(recorder.launches, key=lambda launch: launch.shared_bytes)
    return main, memory, rounds(form, shape, lengths)


def _record() -> Iterator[dict[str, object]]:
    for form, causal in product(forms(), (False, True)):
        yield {
            "pass": pass_of(form),
            "form": form.name,
            "causal": causal,
            "nvrtc": nvrtc_version(),
            "digest": digest_of(form, causal),
            **follow(form, causal),
        }


def record() -> None:
    """Records the clocks of every form, bf16. A minute."""
    columns = ("pass", "form", "causal", "nvrtc", "digest", "beside", "empty")
    records.write(LINES, (*columns, *clock_columns(ROUNDS)), _record())
