"""Blocks of the sm_80 flash kernels followed through the model of an SM, on an A100 and on Hopper.

Compiles the kernels that run there by default, disassembles them, and follows one block of small
problems (``analysis.loop_model``); needs NVRTC, nvdisasm and a C compiler, no GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Any

from analysis.loop_model.native import simulate
from analysis.loop_model.parameters import Machine
from analysis.loop_model.program import Program, side_by_side
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile
from analysis.sums.packed import ENTRY_BYTES
from kernels import hopper
from kernels.building.compile import nvrtc_version
from kernels.flash_config import HEAD_DIMS, FlashConfig, configure
from kernels.sass import loops
from kernels.timing import records
from kernels.timing.followed_blocks import BEFORE, Features, code_of, dtype_of, launch_of
from kernels.timing.hopper_time import featured, options_of, pass_of
from kernels.timing.records import COLUMN, clock_columns
from kernels.timing.sm80_time import ON_A100, PASSES, Target, digest_of, main_launch

ROUNDS = (2, 4, 8, 16)
"""Lengths of the loop that a block is followed through."""
SHARED_ROUNDS = 8
"""Of the blocks that share an SM."""
FEW, MORE = 1, 3
"""Blocks that follow each other in each place of the SM: the difference is free of the ends."""
SEEDS = 3
"""Draws of which copies come from the far half of L2, and of when blocks start."""
PACKED = "packed"
COLUMNS = (
    "pass",
    "head_dim",
    "causal",
    "options",
    "block_m",
    "block_n",
    "nvrtc",
    "digest",
    "blocks_per_sm",
    "slowdown",
    *clock_columns(ROUNDS),
)


@dataclass(frozen=True)
class Kind:
    """A kernel to follow, by default that which runs on the target.

    head_dim: padded. features: of the scores; with ``packed`` none. tile: another than the default.
    """

    target: Target
    pass_: str
    head_dim: int
    causal: bool
    features: Features = ()
    packed: bool = False
    tile: Tile | None = None

    @property
    def name(self) -> str:
        """What the record calls its options."""
        return PACKED if self.packed else " ".join(self.features)

    @property
    def dtype(self) -> str:
        """Of q, k and v. bf16 has the instructions of fp16 but for the conversion, and the tanh of
        a softcap."""
        return "fp16" if self.target is ON_A100 else dtype_of(self.features)

    @property
    def config(self) -> FlashConfig:
        """What the driver runs it with."""
        options: dict[str, Any] = dict.fromkeys(options_of(self.features), True)
        if self.packed:
            options[PACKED] = True
        return configure(
            self.pass_,
            self.dtype,
            self.head_dim,
            tile=self.tile,
            causal=self.causal,
            limit=self.target.gpu.shared_bytes_per_block,
            **options,
        )

    @property
    def blocks_per_sm(self) -> int:
        """How many an SM holds."""
        return self.config.fit(self.target.gpu).blocks_per_sm

    def __str__(self) -> str:
        mask = "causal" if self.causal else "dense"
        return f"{self.target.name} {self.pass_} {self.head_dim} {mask} {self.name}".rstrip()


def kinds(target: Target) -> Iterator[Kind]:
    """All that is recorded of a card, plain and packed; on an H200 what the Hopper kernels have
    clocks for as well."""
    head_dims = dict.fromkeys(PASSES, HEAD_DIMS) if target is ON_A100 else hopper.HEAD_DIMS
    for pass_ in PASSES:
        for head_dim, causal in product(head_dims[pass_], (False, True)):
            yield Kind(target, pass_, head_dim, causal)
            if 64 <= head_dim <= 128:
                yield Kind(target, pass_, head_dim, causal, packed=True)
    if target is ON_A100:
        return
    for form, features in featured():
        for causal in (False, True):
            yield Kind(target, pass_of(form), form.head_dim, causal, features)


def _small(kind: Kind, rounds: int) -> AttentionShape:
    """One head whose first block walks ``rounds`` tiles. A window is followed as Hopper's forms
    are: either of its ends cuts a tile."""
    tile, some = kind.config.tile, AttentionShape(1, 1, 1, 1, kind.head_dim, dtype=kind.dtype, causal=kind.causal)
    if "window" not in kind.features:
        seqlen = rounds * (tile.block_n if kind.pass_ == "forward" else tile.block_m)
        return replace(some, seqlen_q=seqlen, seqlen_k=seqlen)
    if kind.pass_ == "forward":  # one query tile, whose window ends on its diagonal
        keys = (rounds + BEFORE) * tile.block_n
        left = keys - tile.block_m - BEFORE * tile.block_n - tile.block_n // 2
        return replace(some, seqlen_q=tile.block_m, seqlen_k=keys, window=(left, 0))
    rows = rounds * tile.block_m + BEFORE * tile.block_n  # the first of several key tiles
    left = max(0, rounds * tile.block_m - tile.block_m // 2 - tile.block_n)
    return replace(some, seqlen_q=rows, seqlen_k=rows, window=(left, 0))


def lengths_of(kind: Kind) -> tuple[int, ...]:
    """Rounds of the followed blocks: a window has at least those of a query tile's diagonal."""
    if kind.pass_ == "backward" or "window" not in kind.features:
        return ROUNDS
    tile = kind.config.tile
    return tuple(n for n in ROUNDS if (2 * n - 1) * tile.block_n >= 2 * tile.block_m)


def followed(kind: Kind, rounds: int) -> Program:
    """What the warps of block 0 of one head execute, whose loop has so many rounds."""
    shape, lengths, memory = _small(kind, rounds), None, {}
    if kind.packed:
        lengths = Lengths.equal([shape.seqlen_q])
        shape = lengths.packed_shape(shape)
        # Both tables, which hold the same, lie where the lower half of an address is 0.
        memory = {ENTRY_BYTES * at: start for at, start in enumerate(lengths.tables[0])}
    main = main_launch(shape, kind.pass_, kind.target, kind.features, lengths, kind.tile)
    arch = kind.target.arch
    launch = replace(launch_of(main), architecture=arch, memory=memory)
    return loops.program(code_of(main.kernel, arch), launch)


def follow(
    programs: Mapping[int, Program], shared_rounds: int, blocks_per_sm: int, machine: Machine
) -> dict[str, object]:
    """The columns of a record that come from the model: programs of one block by its rounds.

    shared_rounds: of the blocks that are followed beside each other.
    """
    alone = {rounds: _alone(program, machine) for rounds, program in programs.items()}
    slowdown = _slowdown(programs[shared_rounds], blocks_per_sm, alone[shared_rounds], machine)
    return {
        "blocks_per_sm": blocks_per_sm,
        "slowdown": round(slowdown, 3),
        **{f"{COLUMN}{rounds}": round(value) for rounds, value in alone.items()},
    }


def _alone(found: Program, machine: Machine) -> float:
    return mean(
        simulate(found, seed=seed, pick=machine.pick, parameters=machine.parameters).clocks for seed in range(SEEDS)
    )


def _slowdown(found: Program, blocks: int, alone: float, machine: Machine) -> float:
    """Blocks of an SM start at any time of each other."""
    if blocks == 1:
        return 1.0
    warps = len(found.ways)
    ratios = []
    for seed in range(SEEDS):
        draw = random.Random(seed)
        starts = [draw.randrange(round(alone)) for _ in range(blocks) for _ in range(warps)]
        starts = [starts[warps * (warp // warps)] for warp in range(blocks * warps)]
        few, more = (
            simulate(
                side_by_side(found, blocks, times),
                seed=seed,
                start=starts,
                pick=machine.pick,
                parameters=machine.parameters,
            ).clocks
            for times in (FEW, MORE)
        )
        ratios.append((more - few) / (MORE - FEW) / alone)
    return mean(ratios)


def columns_of(kind: Kind, lengths: tuple[int, ...] = ()) -> dict[str, object]:
    """:func:`follow` of one of our kernels. lengths: of the loop, ``SHARED_ROUNDS`` among them; by
    default all."""
    programs = {rounds: followed(kind, rounds) for rounds in lengths or lengths_of(kind)}
    return follow(programs, SHARED_ROUNDS, kind.blocks_per_sm, kind.target.machine)


def _rows(target: Target) -> Iterator[dict[str, object]]:
    for kind in kinds(target):
        config = kind.config
        yield {
            "pass": kind.pass_,
            "head_dim": kind.head_dim,
            "causal": kind.causal,
            "options": kind.name,
            "block_m": config.tile.block_m,
            "block_n": config.tile.block_n,
            "nvrtc": nvrtc_version(),
            "digest": digest_of(config.kernel()),
            **columns_of(kind),
        }


def record(target: Target) -> None:
    """Records the clocks of every kind. Half a minute, of an H200 minutes."""
    records.write(target.lines, COLUMNS, _rows(target))
