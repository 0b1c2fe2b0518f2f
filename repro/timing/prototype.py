"""A Hopper prototype of 42 variants that was timed on an H200, as a test of the model of time.

``results/prototype``: what each variant is (``variants.csv``) and its machine code
(``listings.txt.xz``); the times are records, ``prototype-time`` of the H200. Nothing of it runs
here; its code is read, its launches are known, and the model says how many clocks they take.
"""

from __future__ import annotations

import csv
import lzma
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean

from analysis.loop_model.card import H200_SUSTAINED, HBM_SUSTAINED, LAUNCH_S, copy_bytes_per_clock, fill, through
from analysis.loop_model.native import simulate
from analysis.loop_model.parameters import SM90
from analysis.loop_model.program import Program
from kernels.sass import loops
from kernels.sass.code import Code
from kernels.sass.listing import parse_listing
from kernels.sass.operands import Launch, TensorMapArgument
from repro.measuring.records import COMMITTED

FOLDER = COMMITTED / "prototype"
TOKENS, HIDDEN = 16384, 2048
MULTIPROCESSORS = 132
HBM_BYTES_PER_S = 4.8e12
KEYS = 128
"""Of a backward block."""
WARPGROUP_ROWS = 64
NEVER = 1_000_000
"""A tile number beyond the last."""
SEEDS = 3
"""Starts that are tried: warpgroups begin up to START clocks apart, copies come from either half
of L2. Two groups of warps can fall into step or out of it, so one start is not the answer."""
START = 400
SECTION_BYTES = 50e6
"""Heads of a causal grid are taken in groups whose K and V fit in this much of L2."""


@dataclass(frozen=True)
class Variant:
    """One kernel of the prototype.

    persistent: 0 one block a tile, 1 a block takes every 132nd tile, 2 the next one of a counter.
    longest_first: order of the tiles.
    """

    name: str
    head_dim: int
    causal: bool
    backward: bool
    consumers: int
    block_m: int
    block_n: int
    persistent: int
    longest_first: bool

    @property
    def heads(self) -> int:
        """At one sequence of all tokens; more sequences have as many each."""
        return HIDDEN // self.head_dim

    def flops(self, seqlen: int) -> float:
        """As the times were converted: nothing for recomputation, half under a mask."""
        forward = 4 * TOKENS * HIDDEN * seqlen / (2 if self.causal else 1)
        return forward * (2.5 if self.backward else 1)


@cache
def variants() -> dict[str, Variant]:
    """All variants by name."""
    found = {}
    with (FOLDER / "variants.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            macros = dict(d.removeprefix("-D").split("=") for d in row["defines"].split())
            backward = "BM" in macros
            consumers = 2 if backward else int(macros["NWG"])
            found[row["variant"]] = Variant(
                row["variant"],
                int(macros["HD"]),
                macros["CAUSAL"] == "1",
                backward,
                consumers,
                int(macros["BM"]) if backward else WARPGROUP_ROWS * consumers,
                KEYS if backward else int(macros["BN"]),
                int(macros.get("PERS", 0)),
                macros["SCHED"] == "1",
            )
    return found


@cache
def _listings() -> str:
    return lzma.decompress((FOLDER / "listings.txt.xz").read_bytes()).decode()


@cache
def code(name: str) -> Code:
    """The machine code of a variant."""
    text = _listings()
    start = text.find(f"# {name}\n")
    if start < 0:
        raise ValueError(f"no listing of {name!r}")
    end = text.find("\n# ", start)
    return parse_listing(text[start : end if end > 0 else len(text)].splitlines()[1:])


def launch(v: Variant, seqlen: int, block: int, *, tiles: int | None = None, taken: Sequence[int] = ()) -> Launch:
    """A launch of the main kernel, seen by one block. tiles: how many there are, by default all."""
    row = 2 * v.head_dim
    batch_heads = TOKENS // seqlen * v.heads
    scale = (4, 0x3D000000)

    def tensor_map(rows: int) -> tuple[int, TensorMapArgument]:
        return 128, TensorMapArgument(rows * row)

    if v.backward:
        key_tiles = -(-seqlen // KEYS)
        padded = -(-seqlen // v.block_m) * v.block_m
        maps = [tensor_map(n) for n in (v.block_m, KEYS, KEYS, v.block_m, 64, 64)]
        pointers = [(8, n << 40) for n in (1, 2, 3)]
        numbers = [(4, n) for n in (seqlen, seqlen, padded, batch_heads)]
        rest = [scale, (4, key_tiles), (4, batch_heads)]
        return Launch(384, (key_tiles * batch_heads, 1, 1), [*maps, *pointers, *numbers, *rest], (block, 0, 0))
    query_tiles = -(-seqlen // v.block_m)
    count = tiles or query_tiles * batch_heads
    maps = [tensor_map(n) for n in (64, v.block_n, v.block_n, 64)]
    numbers = [(4, n) for n in (seqlen, seqlen, batch_heads, 1)]
    rest = [scale, (4, query_tiles), (4, _section(v, seqlen)), (4, count), (8, 2 << 40)]
    grid = MULTIPROCESSORS if v.persistent else count
    return Launch(128 * (v.consumers + 1), (grid, 1, 1), [*maps, (8, 1 << 40), *numbers, *rest], (block, 0, 0), taken)


def _section(v: Variant, seqlen: int) -> int:
    """Heads that a longest-first order takes together: a power of two, at most all."""
    heads = 1
    while 2 * heads * 2 * seqlen * v.head_dim * 2 <= SECTION_BYTES and 2 * heads <= _all_heads(v, seqlen):
        heads *= 2
    return heads


def _all_heads(v: Variant, seqlen: int) -> int:
    return TOKENS // seqlen * v.heads


@cache
def program(name: str, seqlen: int, block: int, tiles: int | None, taken: tuple[int, ...]) -> Program:
    """What a block executes."""
    return loops.program(code(name), launch(variants()[name], seqlen, block, tiles=tiles, taken=taken))


@cache
def _block(
    name: str, seqlen: int, block: int, tiles: int | None = None, taken: tuple[int, ...] = ()
) -> tuple[float, ...]:
    """Clocks of a block for each start that is tried."""
    of = program(name, seqlen, block, tiles, taken)
    copied = copy_bytes_per_clock(SM90["copy_bytes"].value, H200_SUSTAINED, MULTIPROCESSORS)
    found = []
    for seed in range(SEEDS):
        draw = random.Random(seed)
        groups = [draw.randrange(START) if seed else 0 for _ in range(len(of.ways) // 4 + 1)]
        starts = [groups[warp // 4] for warp in range(len(of.ways))]
        found.append(float(simulate(of, seed=seed, start=starts, copy_bytes=copied).clocks))
    return tuple(found)


def block_clocks(name: str, seqlen: int, block: int = 0, **options: object) -> float:
    """Clocks of a block, the mean over starts."""
    return mean(_block(name, seqlen, block, **options))


def spread(name: str, seqlen: int = 2048) -> float:
    """Largest less smallest over mean of the clocks of a block, over starts."""
    persistent = variants()[name].persistent
    tiles = 2 * MULTIPROCESSORS if persistent == 1 else None
    found = _block(name, seqlen, 0, tiles, (NEVER,) if persistent == 2 else ())
    return (max(found) - min(found)) / mean(found)


def clocks(name: str, seqlen: int) -> float:
    """Clocks of the main kernel on a card of 132 SMs.

    Up to 2048 each kind of block is followed from end to end; longer ones by the clocks that more
    rounds added there.
    """
    v = variants()[name]
    if v.backward:
        return _backward_clocks(v, seqlen)
    if v.causal:
        return _causal_clocks(v, seqlen)
    rounds = -(-seqlen // v.block_n)
    tiles = -(-seqlen // v.block_m) * _all_heads(v, seqlen)
    waves = -(-tiles // MULTIPROCESSORS)
    known = (2048, 4096) if v.persistent == 0 else (1024, 2048)
    lengths = (seqlen,) if seqlen in known[:1] or seqlen <= 2048 else known
    if v.persistent == 0:
        points = [(-(-n // v.block_n), block_clocks(name, n)) for n in lengths]
        return waves * _along(points, rounds)
    first, more = [], []
    for n in lengths:
        two = block_clocks(name, n, tiles=2 * MULTIPROCESSORS)
        four = block_clocks(name, n, tiles=4 * MULTIPROCESSORS)
        first.append((-(-n // v.block_n), two))
        more.append((-(-n // v.block_n), (four - two) / 2))
    return _along(first, rounds) + (waves - 2) * _along(more, rounds)


def _along(points: list[tuple[int, float]], x: int) -> float:
    return points[0][1] if len(points) == 1 else through(points)(x)


def _backward_clocks(v: Variant, seqlen: int) -> float:
    key_tiles = -(-seqlen // KEYS)
    heads = _all_heads(v, seqlen)
    if not v.causal:
        if seqlen <= 2048:
            one = block_clocks(v.name, seqlen)
        else:
            one = through([(n, block_clocks(v.name, n)) for n in (1024, 2048)])(seqlen)
        return fill([one] * (key_tiles * heads), MULTIPROCESSORS)
    # Key block n of a sequence has what is left behind it to do.
    left = through([(n, block_clocks(v.name, 2048, 16 - n)) for n in (1, 2, 4, 8, 12, 16)])
    return fill((left(key_tiles - n) for _ in range(heads) for n in range(key_tiles)), MULTIPROCESSORS)


def _causal_clocks(v: Variant, seqlen: int) -> float:
    short = -(-2048 // v.block_m)
    section = _section(v, 2048)
    places = [m for m in (0, 1, 3, 5, 7, 10, 15) if m < short]

    def number(m: int) -> int:
        """A block with query tile m at 2048."""
        return (short - 1 - m) * section if v.longest_first else m

    tiles, heads = -(-seqlen // v.block_m), _all_heads(v, seqlen)
    order: list[int] = []
    if v.longest_first:
        together = _section(v, seqlen)
        for start in range(0, heads, together):
            of = min(together, heads - start)
            order += [m for m in reversed(range(tiles)) for _ in range(of)]
    else:
        order = [m for _ in range(heads) for m in range(tiles)]
    if v.persistent == 0:
        one = through([(m, block_clocks(v.name, 2048, number(m))) for m in places])
        return fill((one(m) for m in order), MULTIPROCESSORS)

    def takes(m: int, tiles_of_a_length: int) -> float:
        """A block that takes several tiles of one length from the counter, and then no more."""
        block = number(m)
        more = [block + k - MULTIPROCESSORS for k in range(1, tiles_of_a_length)]
        return block_clocks(v.name, 2048, block, taken=(*more, NEVER))

    added = through([(m, (takes(m, 4) - takes(m, 2)) / 2) for m in places])
    start_and_end = takes(places[-1], 1) - added(places[-1])
    return start_and_end + fill((added(m) for m in order), MULTIPROCESSORS)


def seconds(name: str, seqlen: int, clock_hz: float = H200_SUSTAINED.hz) -> float:
    """Time as it was measured: with preprocess and postprocess in a backward.

    Those two move bytes and nothing else: O and dO in, an fp32 dQ zeroed; that dQ in, dQ out.
    """
    v = variants()[name]
    found = clocks(name, seqlen) / clock_hz + LAUNCH_S
    if v.backward:
        tensor = TOKENS * HIDDEN * 2
        moved = (2 * tensor + 2 * tensor) + (2 * tensor + tensor)
        found += moved / (HBM_SUSTAINED * HBM_BYTES_PER_S) + 2 * LAUNCH_S
    return found
