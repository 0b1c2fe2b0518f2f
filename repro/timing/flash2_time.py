"""The model of time on machine code that is not ours: FlashAttention-2's, as torch ships it.

Its kernels lie in torch's CUDA wheel, for sm_80 and for sm_90, which an H200 takes. They are read
from there, not copied: what is kept is how many clocks the model says a block takes, and what it
executes in a round of its loop, counted (``results/flash2``). Times of FlashAttention-2 on an A100
and an H200 are then a test on which nobody decided anything.

    cuobjdump -xelf sm_90 libtorch_cuda.so                  # into an empty folder
    python -m repro.timing flash2 FOLDER VERSION --arch sm_90 # version of torch

needs nvdisasm and a C compiler; no GPU, and no torch that is installed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from analysis.hardware import A100_80GB, H200, Gpu
from analysis.loop_model import ampere, hopper_warps
from analysis.loop_model.card import H200_SUSTAINED, Clock
from analysis.loop_model.parameters import Machine
from analysis.loop_model.program import Program
from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from kernels.building.cache import digest
from kernels.sass import loops
from kernels.sass.code import Code, disassemble
from kernels.sass.operands import Launch
from kernels.timing import records
from kernels.timing.followed_warps import follow
from kernels.timing.hopper_time import seconds_around
from kernels.timing.records import Recorded, clock_columns
from kernels.timing.sm80_time import PASSES
from repro.measuring.records import COMMITTED
from repro.shipped.flash2 import FORMS, pattern
from repro.timing.round_counts import Key, peer_record, write_counts

FOLDER = COMMITTED / "flash2"
ROUNDS = (2, 4, 8)
HEAD_DIMS = (64, 128)


@dataclass(frozen=True, eq=False)
class Target:
    """A card, the code in the wheel that it takes, and the model of its SM.

    dtype: of the kernels that are read; the other half precision has the same instructions but for
        the conversion.
    """

    arch: str
    dtype: str
    gpu: Gpu
    clock: Clock
    machine: Machine

    @property
    def lines(self) -> Path:
        return FOLDER / ("lines.csv" if self.arch == "sm_80" else f"{self.arch}_lines.csv")

    @property
    def counts(self) -> Path:
        return FOLDER / f"{self.arch}_counts.csv"


_BOOST = Clock(A100_80GB.boost_clock_hz, "boost clock of the datasheet")
ON_A100 = Target("sm_80", "fp16", A100_80GB, _BOOST, ampere.MACHINE)
ON_H200 = Target("sm_90", "bf16", H200, H200_SUSTAINED, hopper_warps.MACHINE)
TARGETS = {target.arch: target for target in (ON_A100, ON_H200)}
GPU = ON_A100.gpu
#: The struct of arguments: where its fields lie in bytes, 8 bytes each ("q") or 4 ("i"). Those that
#: are left out are zero: no lengths of a packed batch, no slopes, no dropout.
_POINTERS = (0, 8, 16, 112, 160)  # q, k, v, out, lse
_BATCH_STRIDES, _ROW_STRIDES, _HEAD_STRIDES = ((24, 32, 40, 128), (48, 56, 64, 136), (72, 80, 88, 144))
_HEADS, _BATCH, _LENGTHS, _HEAD_DIM, _ROUNDED = (96, 100, 104), 176, (180, 184), 192, (196, 200)
_WINDOW = (388, 392)  # keys to the left and to the right, -1 for all
_GRADIENTS = 464  # of the backward: pointers of dO, dQ, dK, dV and of the sum of dQ, then strides
_STRUCT_BYTES = 648


def arguments(pass_: str, seqlen: int, head_dim: int, causal: bool) -> bytes:
    """The struct for one head of one item."""
    found = bytearray(_STRUCT_BYTES)

    def put(letter: str, places: tuple[int, ...], value: int) -> None:
        for place in places:
            struct.pack_into(f"<{letter}", found, place, value)

    for number, place in enumerate(_POINTERS):
        put("q", (place,), number + 1 << 36)
    for places, stride in ((_BATCH_STRIDES, seqlen * head_dim), (_ROW_STRIDES, head_dim), (_HEAD_STRIDES, head_dim)):
        put("q", places, stride)
    put("i", (*_HEADS, _BATCH), 1)
    put("i", _LENGTHS + _ROUNDED, seqlen)
    put("i", (_HEAD_DIM, _ROUNDED[1] + 4), head_dim)
    put("i", _WINDOW, -1)
    if causal:
        put("i", _WINDOW[1:], 0)
    if pass_ == "backward":
        for number in range(5):
            put("q", (_GRADIENTS + 8 * number,), number + 8 << 36)
        strides = [seqlen * head_dim, *[head_dim] * 2, *[seqlen * head_dim] * 3, *[head_dim] * 6]
        for number, stride in enumerate(strides):
            put("q", (_GRADIENTS + 56 + 8 * number,), stride)
    return bytes(found)


def program(code: Code, pass_: str, head_dim: int, causal: bool, rounds: int, arch: str = ON_A100.arch) -> Program:
    """The block that walks so many tiles: of a causal forward the last one."""
    form = FORMS[pass_, head_dim]
    inner, outer = form.tile.block_n, form.tile.block_m
    if pass_ == "backward":
        inner, outer = outer, inner
    seqlen = rounds * inner
    blocks = -(-seqlen // outer)
    place = blocks - 1 if pass_ == "forward" and causal else 0
    data = arguments(pass_, seqlen, head_dim, causal)
    argument = (len(data), int.from_bytes(data, "little"))
    launch = Launch(32 * form.warps, (blocks, 1, 1), [argument], (place, 0, 0), architecture=arch)
    return loops.program(code, launch)


def entry_in(cubin: bytes, pass_: str, head_dim: int, causal: bool, dtype: str = ON_A100.dtype) -> str | None:
    """The mangled name of a kernel in a cubin, without masks of lengths; None: not there."""
    name = pattern(pass_, head_dim, dtype, causal)
    found = re.search(rf"\.text\.(_ZN\w*{name}\w+)\0".encode(), cubin)
    return found[1].decode() if found else None


def version(target: Target = ON_A100) -> str:
    """Of torch whose machine code is on record."""
    return records.rows(target.lines)[0]["torch"]


def recorded(key: Key, target: Target = ON_A100) -> Recorded:
    """What is on record by pass, head dimension and causal mask. KeyError for others."""
    return peer_record(target.lines, key)


def _rounds(pass_: str, tile: Tile, shape: AttentionShape) -> Iterator[int]:
    """Of every block in the order they start: in a head the first tile first."""
    visits = tile_loop(shape, tile)
    of_head = visits.visits_of_query_tile if pass_ == "forward" else visits.visits_of_key_tile
    for _ in range(shape.batch * shape.heads):
        yield from of_head.tolist()


def clocks(pass_: str, shape: AttentionShape, target: Target = ON_A100) -> float:
    """Of the main kernel of a pass on all SMs of the target's card. KeyError for another head
    dimension than is on record."""
    found = recorded((pass_, shape.head_dim, shape.causal), target)
    tile = FORMS[pass_, shape.head_dim].tile
    return found.clocks(_rounds(pass_, tile, shape), target.gpu.sms)


def seconds(pass_: str, shape: AttentionShape, target: Target = ON_A100, clock: Clock | None = None) -> float:
    """Predicted time of a pass, at another clock than the target's where one is given. Errors as
    :func:`clocks`."""
    around = seconds_around(pass_, shape, 1, target.gpu.hbm_bandwidth_bytes_per_s)
    return clocks(pass_, shape, target) / (clock or target.clock).hz + around


def record(folder: Path, version: str, target: Target = ON_A100) -> None:
    """Writes the record: clocks, and what a round executes. ValueError names a kernel that is in
    none of the folder's cubins."""
    cubins = [path.read_bytes() for path in sorted(folder.glob("*.cubin"))]
    rows, rounds = [], {}
    for pass_, head_dim, causal in product(PASSES, HEAD_DIMS, (False, True)):
        entries = ((cubin, entry_in(cubin, pass_, head_dim, causal, target.dtype)) for cubin in cubins)
        cubin, entry = next((pair for pair in entries if pair[1]), (b"", None))
        if entry is None:
            raise ValueError(f"no {pass_} for head_dim={head_dim}, causal={causal} in the cubins of {folder}")
        code = disassemble(cubin, entry)
        programs = {n: program(code, pass_, head_dim, causal, n, target.arch) for n in ROUNDS}
        rounds[pass_, head_dim, causal] = (programs[ROUNDS[-2]], programs[ROUNDS[-1]])
        form = FORMS[pass_, head_dim]
        rows.append(
            {
                "pass": pass_,
                "head_dim": head_dim,
                "causal": causal,
                "block_m": form.tile.block_m,
                "block_n": form.tile.block_n,
                "torch": version,
                "digest": digest(cubin)[:16],
                **follow(programs, ROUNDS[-1], form.blocks_per_sm, target.machine),
            }
        )
    columns = (
        "pass",
        "head_dim",
        "causal",
        "block_m",
        "block_n",
        "torch",
        "digest",
        "blocks_per_sm",
        "slowdown",
        *clock_columns(ROUNDS),
    )
    records.write(target.lines, columns, rows)
    write_counts(target.counts, rounds, ROUNDS[-1] - ROUNDS[-2])
