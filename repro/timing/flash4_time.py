"""The model of time on FlashAttention-4's kernels for Hopper, as its DSL compiles them.

They are compiled without a GPU (``results/flash4/README.md`` says how), read and not kept: what is
kept is how many clocks the model says a block takes, and what it executes in a round of its loop.

    python -m repro.timing flash4 FOLDER VERSION DSL_VERSION

needs nvdisasm and a C compiler; no GPU, and no FlashAttention that is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from analysis.hardware import H200
from analysis.loop_model import card
from analysis.loop_model.program import Program
from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from kernels.building.cache import digest
from kernels.launch import ITEMSIZE
from kernels.sass import loops
from kernels.sass.code import Code, disassemble
from kernels.sass.operands import Launch, TensorMapArgument
from kernels.timing import records
from kernels.timing.followed_blocks import ROUNDS, clocks_of
from kernels.timing.hopper_time import longest_first, seconds_around
from kernels.timing.records import COLUMN, Recorded, clock_columns
from repro.measuring.records import COMMITTED
from repro.timing.round_counts import Key, peer_record, write_counts

FOLDER = COMMITTED / "flash4"
LINES = FOLDER / "lines.csv"
COUNTS = FOLDER / "counts.csv"
GPU = H200
L2_BYTES = 50 << 20
"""Of keys and values of heads that FlashAttention-4 lets run side by side under a causal mask."""
_SWIZZLE_COLUMNS = 64
"""Of a tensor map's box: a row of 128 bytes."""


@dataclass(frozen=True)
class Form:
    """What FlashAttention-4 launches on Hopper (its ``interface.py``)."""

    tile: Tile
    threads: int


FORMS: dict[Key, Form] = {
    ("forward", 64, False): Form(Tile(192, 128), 512),
    ("forward", 64, True): Form(Tile(192, 128), 512),
    ("forward", 128, False): Form(Tile(128, 128), 384),
    ("forward", 128, True): Form(Tile(128, 128), 384),
    ("backward", 64, False): Form(Tile(128, 128), 384),
    ("backward", 64, True): Form(Tile(128, 128), 384),
    ("backward", 128, False): Form(Tile(80, 128), 384),
    ("backward", 128, True): Form(Tile(64, 128), 384),
}
_ENTRIES = {"forward": "FlashAttentionForwardSm90", "backward": "FlashAttentionBackwardSm90"}

Argument = tuple[int, int | TensorMapArgument]


def _words(*values: int) -> Argument:
    data = b"".join(value.to_bytes(4, "little") for value in values)
    return len(data), int.from_bytes(data, "little")


def _divisor(by: int) -> list[Argument]:
    """A division by multiplication (Granlund and Montgomery): divisor, factor and two shifts, and
    the divisor once more."""
    bits = (by - 1).bit_length()
    factor = ((1 << 32) * ((1 << bits) - by) // by + 1) & 0xFFFFFFFF
    shifts = min(bits, 1) | max(bits - 1, 0) << 8
    return [_words(by, factor, shifts), _words(by)]


def _boxes(*rows: int) -> list[Argument]:
    """Tensor maps whose boxes have so many rows."""
    return [(128, TensorMapArgument(2 * _SWIZZLE_COLUMNS * n)) for n in rows]


def arguments(key: Key, seqlen: int) -> list[Argument]:
    """Of one head of one item: shapes, tensor maps, row statistics, scales, the order of tiles."""
    pass_, head_dim, causal = key
    tile, shape = FORMS[key].tile, _words(seqlen, head_dim, 1, 1)
    one, pointer = _words(1), (40, 1 << 36)
    empty: Argument = (1, 0)
    scale: Argument = (4, 0x3F800000)
    m, n = tile.block_m, tile.block_n
    if pass_ == "backward":
        blocks = _words(-(-seqlen // n))
        rows = (m, n, n, m, n, n)  # Q, K, V, dO, dK, dV
        order = [blocks, one, one, *_divisor(1)]
        return [*[shape] * 6, *_boxes(*rows), *[pointer] * 3, *[empty] * 4, *[scale] * 2, *order]
    blocks = _words(-(-seqlen // m))
    order = [blocks, one, one, *_divisor(1)]
    if causal:  # tiles, tiles of a head, heads, items, heads side by side; divisors; quotient
        of_head = _divisor(-(-seqlen // m))
        order = [blocks, blocks, *[one] * 3, *_divisor(1), *_divisor(1), *of_head, *_divisor(1), one, *_divisor(1)]
    return [*[shape] * 4, pointer, *_boxes(m, n, n, m), scale, empty, empty, *order]


def program(code: Code, key: Key, rounds: int) -> Program:
    """The first block of a problem, which walks so many tiles."""
    pass_, _, _ = key
    form = FORMS[key]
    inner, outer = form.tile.block_n, form.tile.block_m
    if pass_ == "backward":
        inner, outer = outer, inner
    seqlen = rounds * inner
    launch = Launch(form.threads, (-(-seqlen // outer), 1, 1), arguments(key, seqlen))
    return loops.program(code, launch)


def recorded(key: Key) -> Recorded:
    """What is on record by pass, head dimension and causal mask. KeyError for others."""
    return peer_record(LINES, key)


def versions() -> tuple[str, str]:
    """Of FlashAttention-4 and of its DSL, whose machine code is on record."""
    row = records.rows(LINES)[0]
    return row["flash_attn"], row["cutlass_dsl"]


def heads_side_by_side(shape: AttentionShape) -> int:
    """Heads whose tiles take turns under a causal mask: the largest power of two whose keys and
    values fit the L2 that its scheduler counts on."""
    one = 2 * shape.seqlen_k * shape.head_dim * ITEMSIZE[shape.dtype]
    return 1 << max(0, (L2_BYTES // one).bit_length() - 1)


def rounds_of(pass_: str, tile: Tile, shape: AttentionShape) -> Iterator[int]:
    """Of every block in the order they start: of a causal forward the longest tiles of some heads
    first, else head after head from the first tile."""
    visits, heads = tile_loop(shape, tile), shape.batch * shape.heads
    if pass_ == "forward" and shape.causal:
        tiles = reversed(visits.visits_of_query_tile.tolist())
        yield from longest_first(tiles, heads, heads_side_by_side(shape))
        return
    of_head = visits.visits_of_query_tile if pass_ == "forward" else visits.visits_of_key_tile
    for _ in range(heads):
        yield from of_head.tolist()


def seconds(pass_: str, shape: AttentionShape, clock: card.Clock = card.H200_SUSTAINED) -> float:
    """Predicted time of a pass on an H200. KeyError for another head dimension than is on
    record."""
    key = (pass_, shape.head_dim, shape.causal)
    clocks = recorded(key).clocks(rounds_of(pass_, FORMS[key].tile, shape), GPU.sms)
    return clocks / clock.hz + seconds_around(pass_, shape, 1, GPU.hbm_bandwidth_bytes_per_s)


def _code_of(folder: Path, key: Key) -> tuple[Code, str]:
    """The kernel in ``forward_64_0`` and the like, and the digest of its cubin."""
    pass_, head_dim, causal = key
    place = folder / f"{pass_}_{head_dim}_{int(causal)}"
    for path in sorted(place.glob("*.cubin")):
        cubin = path.read_bytes()
        entry = re.search(rf"\.text\.(\w*{_ENTRIES[pass_]}\w*)\0".encode(), cubin)
        if entry is not None:
            return disassemble(cubin, entry[1].decode()), digest(cubin)[:16]
    raise ValueError(f"no {pass_} kernel for sm_90a in the cubins of {place}")


def record(folder: Path, version: str, dsl: str) -> None:
    """Writes the record. ValueError names a folder without its kernel."""
    rows, ends = [], {}
    for key, form in FORMS.items():
        code, hash_ = _code_of(folder, key)
        programs = {n: program(code, key, n) for n in ROUNDS}
        ends[key] = (programs[ROUNDS[-2]], programs[ROUNDS[-1]])
        rows.append(
            {
                "pass": key[0],
                "head_dim": key[1],
                "causal": key[2],
                "block_m": form.tile.block_m,
                "block_n": form.tile.block_n,
                "flash_attn": version,
                "cutlass_dsl": dsl,
                "digest": hash_,
                **{f"{COLUMN}{n}": round(clocks_of(programs[n])) for n in ROUNDS},
            }
        )
    columns = (
        "pass",
        "head_dim",
        "causal",
        "block_m",
        "block_n",
        "flash_attn",
        "cutlass_dsl",
        "digest",
        *clock_columns(ROUNDS),
    )
    records.write(LINES, columns, rows)
    write_counts(COUNTS, ends, ROUNDS[-1] - ROUNDS[-2])
