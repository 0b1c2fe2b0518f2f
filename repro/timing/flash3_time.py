"""The model of time on FlashAttention-3's forward kernels, from the machine code of a package.

The wheel of ``fa3-fwd`` holds them for sm_90a. They are read from there, not copied: what is kept
is how many clocks the model says a tile takes, and what a round of its loop executes
(``results/flash3``). 24 times on an H100 whose clock was locked at 1,500 MHz were published with
FlashGPU-Sim, so that here no clock is open.

    cuobjdump -xelf sm_90a fa3_fwd/_C.abi3.so     # into an empty folder
    python -m repro.timing flash3 FOLDER VERSION    # of fa3-fwd; writes the record
    python -m repro.timing tables fa3-code        # its table in docs/pages/time-validation.md

The record needs nvdisasm and a C compiler; no GPU, and no FlashAttention that is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from analysis.hardware import gpu_named
from analysis.loop_model import card
from analysis.loop_model.card import Clock
from analysis.loop_model.program import Program
from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from kernels.building.cache import digest
from kernels.launch import ITEMSIZE
from kernels.sass import loops
from kernels.sass.code import Code, disassemble
from kernels.sass.operands import Launch, TensorMapArgument
from kernels.sass.run import PARAMETERS
from kernels.timing import records
from kernels.timing.followed_blocks import NEVER, ROUNDS, clocks_of
from kernels.timing.hopper_time import longest_first
from kernels.timing.records import Recorded, clock_columns
from repro.measuring.records import COMMITTED, Record, load
from repro.timing.round_counts import Key, write_counts

FOLDER = COMMITTED / "flash3"
LINES = FOLDER / "lines.csv"
COUNTS = FOLDER / "counts.csv"
CLOCK = Clock(1.5e9, "locked for the published measurement")
HEADS = 8
"""Of the small problems: tiles of one length lie side by side."""
L2_BYTES = 32 << 20
"""Of keys and values of heads that FlashAttention-3 lets run side by side under a causal mask."""
_COLUMNS = 64
"""Of a tensor map's box: a row of 128 bytes."""


@dataclass(frozen=True)
class Form:
    """What FlashAttention-3 launches for half precision (its ``tile_size.h``): tile, threads, and
    whether P V takes P from registers."""

    tile: Tile
    threads: int
    p_in_registers: bool = True


FORMS: dict[Key, Form] = {
    ("forward", 64, False): Form(Tile(192, 192), 512, p_in_registers=False),
    ("forward", 64, True): Form(Tile(192, 128), 512),
    ("forward", 128, False): Form(Tile(128, 176), 384),
    ("forward", 128, True): Form(Tile(128, 128), 384),
}

#: Where the kernels read their argument, in the constant bank: lengths of queries and keys, and
#: the four tensor maps.
_LENGTHS = (0x288, 0x2E0, 0xA88)
_MAPS = {0x480: "Q", 0x580: "K", 0x680: "V", 0xC00: "O"}
_ONES = (0x41C, 0x428)  # divisors: of pages, of query heads that share one
_STRIDES = (0xA8C, 0xAD8, 0xB70, 0xB78)
_STATISTICS = 0xB40  # a pointer, 8 bytes
_END = 0xE00
#: The order of tiles: how many there are; divisors of three words each; of a causal mask also the
#: sections of heads side by side, and a pointer to the counter.
_TILES = {False: 0xDA4, True: 0xDA8}
_DIVISORS = {False: (0xDA8, 0xDB4), True: (0xDAC, 0xDB8, 0xDC4, 0xDD0, 0xDDC)}
_SECTIONS, _COUNTER = 0xDE8, 0xDF0


def _divisor(by: int) -> tuple[int, int, int]:
    """A division by multiplication: divisor, factor, shift of the product's upper half."""
    if by == 1:
        return 1, 0, 0
    power = 31 + (by - 1).bit_length()
    return by, ((1 << power) + by - 1) // by, power - 32


def arguments(key: Key, seqlen: int, tiles: int) -> list[tuple[int, int | TensorMapArgument]]:
    """The struct for ``HEADS`` heads of one item, word by word. tiles: at which a launch without a
    mask ends; with one a counter says so."""
    _, _, causal = key
    tile = FORMS[key].tile
    of_head = -(-seqlen // tile.block_m)
    words = dict.fromkeys(_LENGTHS, seqlen) | dict.fromkeys(_ONES, 1)
    words |= dict.fromkeys(_STRIDES, seqlen) | {_STATISTICS + 4: 1}
    words[_TILES[causal]] = HEADS * of_head if causal else tiles
    divisors = (of_head, HEADS, *((HEADS, HEADS * of_head, 1) if causal else ()))
    for place, by in zip(_DIVISORS[causal], divisors, strict=True):
        words |= {place + 4 * n: word for n, word in enumerate(_divisor(by))}
    if causal:
        words |= {_SECTIONS: 1, _COUNTER + 4: 2}
    found: list[tuple[int, int | TensorMapArgument]] = []
    at = PARAMETERS["sm_90a"]
    while at < _END:
        if at in _MAPS:
            rows = tile.block_n if _MAPS[at] in "KV" else tile.block_m
            found.append((128, TensorMapArgument(2 * _COLUMNS * rows)))
        else:
            found.append((4, words.get(at, 0)))
        at += found[-1][0]
    return found


def program(code: Code, key: Key, rounds: int, tiles: int) -> Program:
    """A block that takes so many tiles, each of so many rounds."""
    form = FORMS[key]
    given = arguments(key, rounds * form.tile.block_n, tiles)
    taken = [*range(tiles - 1), NEVER]
    return loops.program(code, Launch(form.threads, (1, 1, 1), given, taken=taken))


def version() -> str:
    """Of the package whose machine code is on record."""
    return records.rows(LINES)[0]["fa3_fwd"]


def recorded(head_dim: int, causal: bool) -> Recorded:
    """What is on record of a kernel. LookupError where that is nothing."""
    row = records.find(LINES, head_dim=head_dim, causal=causal)
    if row is None:
        raise LookupError(f"nothing of head_dim={head_dim} is on record")
    return Recorded.read(row)


def clocks(shape: AttentionShape, sms: int) -> float:
    """Of a launch: persistent blocks, under a causal mask the longest tiles of some heads first.
    Errors as :func:`recorded`."""
    found = recorded(shape.head_dim, shape.causal)
    assert found.tile is not None
    return found.clocks(_rounds(found.tile, shape), sms)


def _rounds(tile: Tile, shape: AttentionShape) -> Iterator[int]:
    visits = reversed(tile_loop(shape, tile).visits_of_query_tile.tolist())
    one = 2 * shape.seqlen_k * shape.head_dim * ITEMSIZE[shape.dtype]
    group = 1 << max(0, (L2_BYTES // one).bit_length() - 1)
    return longest_first(visits, shape.batch * shape.heads, group)


@dataclass(frozen=True)
class Point:
    """Seconds at 1,500 MHz, as published and as predicted."""

    shape: AttentionShape
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


def points() -> list[Point]:
    """One a published time."""
    return [_point(row) for row in load(("fa3-locked-clock",), local=False)]


def _point(row: Record) -> Point:
    shape = AttentionShape(
        row.batch or 0,
        row.heads or 0,
        row.seqlen_q or 0,
        row.seqlen_k or 0,
        row.head_dim or 0,
        dtype=str(row.dtype),
        causal=bool(row.causal),
    )
    predicted = clocks(shape, gpu_named(str(row.device)).sms) / CLOCK.hz + card.LAUNCH_S
    return Point(shape, 1e-6 * float(row.value or 0), predicted)


def table() -> str:
    """Predicted over published time by kernel and by length, as Markdown."""
    found = points()
    lines = ["| | N = 512 | from N = 1,024: least | median | most |", "|---|---|---|---|---|"]
    for (_, head_dim, causal), form in FORMS.items():
        of = [p for p in found if (p.shape.head_dim, p.shape.causal) == (head_dim, causal)]
        short = [p.ratio for p in of if p.shape.seqlen_q == 512]
        long = [p.ratio for p in of if p.shape.seqlen_q > 512]
        shown = [" and ".join(f"{ratio:.2f}" for ratio in short)]
        shown += [f"{pick(long):.2f}" for pick in (min, median, max)]
        mask = "causal" if causal else "no mask"
        name = f"d = {head_dim}, {form.tile.block_m} x {form.tile.block_n}, {mask}"
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def entry_in(cubin: bytes, key: Key) -> str | None:
    """The mangled name of a bf16 kernel in a cubin: one block a cluster, without masks of lengths,
    pages, caps, packed heads or splits; None: not there."""
    _, head_dim, causal = key
    form = FORMS[key]
    flags = (causal, 0, 0, 0, 0, 0, 0, form.p_in_registers, 1, 0, 0, 0)
    switches = "".join(f"ELb{int(flag)}" for flag in flags).removeprefix("E")
    for found in re.findall(rb"\.text\.(\w*FlashAttnFwdSm90\w+)\0", cubin):
        name: str = found.decode()
        if f"ELi{head_dim}ENS_10bfloat16_tEfNS_4arch4Sm90E{switches}E" not in name:
            continue
        # Sizes are spelled out at first and then referred to: cluster, tile, head dimension.
        sizes = re.findall(r"ILi(\d+)E", name.split("CollectiveMainloop")[1].split("bfloat16")[0])
        spelled = [2, 1, *dict.fromkeys((form.tile.block_m, form.tile.block_n, head_dim))]
        if [int(size) for size in sizes] == spelled:
            return name
    return None


def record(folder: Path, release: str) -> None:
    """Writes the record. ValueError names a kernel that is in none of the folder's cubins."""
    cubins = [path.read_bytes() for path in sorted(folder.glob("*.cubin"))]
    rows, ends = [], {}
    for key, form in FORMS.items():
        pairs = ((cubin, entry_in(cubin, key)) for cubin in cubins)
        cubin, entry = next((pair for pair in pairs if pair[1]), (b"", None))
        if entry is None:
            raise ValueError(f"no forward for head_dim={key[1]}, causal={key[2]} in {folder}")
        code = disassemble(cubin, entry)
        few, more = ([clocks_of(program(code, key, n, tiles)) for n in ROUNDS] for tiles in (2, 4))
        alone = [(b - a) / 2 for a, b in zip(few, more, strict=True)]
        beside = mean(a - 2 * one for a, one in zip(few, alone, strict=True))
        ends[key] = (program(code, key, ROUNDS[-2], 1), program(code, key, ROUNDS[-1], 1))
        rows.append(
            {
                "head_dim": key[1],
                "causal": key[2],
                "block_m": form.tile.block_m,
                "block_n": form.tile.block_n,
                "fa3_fwd": release,
                "digest": digest(cubin)[:16],
                "beside": round(max(0.0, beside)),
                **dict(zip(clock_columns(ROUNDS), map(round, alone), strict=True)),
            }
        )
    columns = ("head_dim", "causal", "block_m", "block_n", "fa3_fwd", "digest", "beside")
    records.write(LINES, (*columns, *clock_columns(ROUNDS)), rows)
    write_counts(COUNTS, ends, ROUNDS[-1] - ROUNDS[-2])
