"""Clocks and seconds of the sm_80 flash kernels on an A100, predicted from their machine code.

``python -m kernels.timing ampere`` compiles the kernels that run there by default,
disassembles them, and follows one block of small problems through the model of an SM
(``analysis.loop_model``); it needs NVRTC, nvdisasm and a C compiler, no GPU. What a block takes
alone is a line in the rounds of its loop; how much longer it takes beside as many others as an SM
holds is one number. Both are recorded in ``ampere_lines.csv`` with a digest of the source, so that
a prediction needs neither compiler nor time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean

from analysis.arguments import checked
from analysis.hardware import A100_80GB, Gpu
from analysis.loop_model import card
from analysis.loop_model.ampere import MACHINE
from analysis.loop_model.native import simulate
from analysis.loop_model.parameters import Machine
from analysis.loop_model.program import Program, side_by_side
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from kernels.building.compile import nvrtc_version
from kernels.flash_config import DTYPE_CODE, HEAD_DIMS, FlashConfig, configure
from kernels.launch import Kernel
from kernels.launches import Device, launches_of
from kernels.sass import loops
from kernels.timing import records
from kernels.timing.followed_blocks import code_of, launch_of
from kernels.timing.hopper_time import seconds_around
from kernels.timing.records import COLUMN, Recorded, clock_columns, digest_of_source

ARCH = "sm_80"
CAPABILITY = (8, 0)
GPU = A100_80GB
PASSES = ("forward", "backward")
ROUNDS = (2, 4, 8, 16)
"""Lengths of the loop that a block is followed through."""
SHARED_ROUNDS = 8
"""Of the blocks that share an SM."""
FEW, MORE = 1, 3
"""Blocks that follow each other in each place of the SM: the difference is free of the ends."""
SEEDS = 3
"""Draws of which copies come from the far half of L2, and of when blocks start."""
DTYPE = "fp16"
"""bf16 has the same instructions but for the conversion."""
LINES = Path(__file__).with_name("ampere_lines.csv")
COLUMNS = ("pass", "head_dim", "causal", "block_m", "block_n", "nvrtc", "digest",
           "blocks_per_sm", "slowdown", *clock_columns(ROUNDS))  # fmt: skip


def follow(
    programs: Mapping[int, Program],
    shared_rounds: int,
    blocks_per_sm: int,
    machine: Machine = MACHINE,
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


def config_of(pass_: str, head_dim: int, causal: bool, tile: Tile | None = None) -> FlashConfig:
    """What runs on an A100, by default or with a tile. head_dim: padded, one of ``HEAD_DIMS``."""
    return configure(
        pass_, DTYPE, head_dim, tile=tile, causal=causal, limit=GPU.shared_bytes_per_block
    )


@checked
def runs_on(gpu: Gpu) -> bool:
    """Whether the model's SM is that of the GPU."""
    return gpu.compute_capability == CAPABILITY


def _program(config: FlashConfig, rounds: int) -> Program:
    """Of the first block of a problem whose loop has so many rounds there."""
    forward = config.pass_ == "forward"
    seqlen = rounds * (config.tile.block_n if forward else config.tile.block_m)
    shape = AttentionShape(
        1,
        1,
        seqlen,
        seqlen,
        config.head_dim,
        dtype=config.dtype,
        causal="causal" in config.features,
    )
    device = Device(ARCH.removeprefix("sm_"), GPU.shared_bytes_per_block, 1)
    main = launches_of("flash", shape, config.pass_, device, tile=config.tile).main
    launch = replace(launch_of(main), architecture=ARCH)
    return loops.program(code_of(main.kernel, ARCH), launch)


def _alone(found: Program, machine: Machine) -> float:
    return mean(
        simulate(found, seed=seed, pick=machine.pick, parameters=machine.parameters).clocks
        for seed in range(SEEDS)
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
                seed=seed, start=starts, pick=machine.pick, parameters=machine.parameters,
            ).clocks
            for times in (FEW, MORE)
        )  # fmt: skip
        ratios.append((more - few) / (MORE - FEW) / alone)
    return mean(ratios)


def follow_form(config: FlashConfig, lengths: Sequence[int] = ROUNDS) -> dict[str, object]:
    """:func:`follow` of one of our kernels. lengths: of the loop, ``SHARED_ROUNDS`` among them."""
    programs = {rounds: _program(config, rounds) for rounds in lengths}
    return follow(programs, SHARED_ROUNDS, config.fit(GPU).blocks_per_sm)


@cache
def digest_of(kernel: Kernel) -> str:
    """Of all that a kernel's machine code follows from, but for the compiler; of bf16 that of
    fp16, but with a softcap, whose tanh is the type's."""
    macros = dict(kernel.macros)
    if macros["DTYPE"] == DTYPE_CODE["bf16"] and "SOFTCAP" not in macros:
        macros["DTYPE"] = DTYPE_CODE[DTYPE]
    return digest_of_source(kernel, macros)


def recorded(kernel: Kernel) -> Recorded:
    """What is on record of a kernel. LookupError where that is nothing: a form that does not run by
    default, or another state of its source."""
    row = records.find(LINES, digest=digest_of(kernel))
    if row is None:
        raise LookupError(
            f"no clocks on record for this {kernel.entry}: python -m kernels.timing ampere "
            "records those of the default forms"
        )
    return Recorded.read(row)


def rounds_of(pass_: str, tile: Tile, shape: AttentionShape) -> Iterator[int]:
    """Rounds of every block, in the order they start: head after head, the longest tile first."""
    visits = tile_loop(shape, tile)
    if pass_ == "forward":
        of_head = visits.visits_of_query_tile[:: -1 if shape.causal else 1].tolist()
        heads = shape.batch * shape.heads
    else:
        of_head = (visits.visits_of_key_tile * shape.group).tolist()
        heads = shape.batch * shape.kv_heads
    for _ in range(heads):
        yield from of_head


def packed_rounds(pass_: str, tile: Tile, shape: AttentionShape, lengths: Lengths) -> Iterator[int]:
    """Rounds of every block with rows, in the order they start: sequence after sequence, head
    after head, under a mask a forward's longest first."""
    for queries, keys in zip(lengths.queries, lengths.keys, strict=True):
        rows, others = (queries, keys) if pass_ == "forward" else (keys, queries)
        step = tile.block_m if pass_ == "forward" else tile.block_n
        if others == 0:
            yield from [0] * (-(-rows // step) * shape.heads)
        elif rows:
            yield from _of_sequence(pass_, tile, replace(shape, seqlen_q=queries, seqlen_k=keys))


@cache
def _of_sequence(pass_: str, tile: Tile, shape: AttentionShape) -> tuple[int, ...]:
    return tuple(rounds_of(pass_, tile, shape))


def walked(pass_: str, tile: Tile, shape: AttentionShape, lengths: Lengths | None) -> Iterator[int]:
    """Rounds of every block in the order they start, of packed sequences too."""
    if lengths is None:
        return rounds_of(pass_, tile, shape)
    return packed_rounds(pass_, tile, shape, lengths)


@checked
def clocks(
    kernel: Kernel, pass_: str, shape: AttentionShape, sms: int, lengths: Lengths | None = None
) -> float:
    """Clocks of the main kernel on a card of ``sms`` multiprocessors. Errors as ``recorded``."""
    found = recorded(kernel)
    assert found.tile is not None
    return found.clocks(walked(pass_, found.tile, shape, lengths), sms)


@checked
def seconds(
    kernel: Kernel,
    pass_: str,
    shape: AttentionShape,
    *,
    sms: int,
    hbm_bytes_per_s: float,
    clock: card.Clock,
    lengths: Lengths | None = None,
) -> float:
    """Time of a pass: its main kernel, and around a backward two that only move bytes.

    kernel: the main one. lengths: of packed sequences. Raises LookupError when its clocks are not
    on record.
    """
    main = clocks(kernel, pass_, shape, sms, lengths) / clock.hz
    return main + seconds_around(pass_, shape, 1, hbm_bytes_per_s)


def _record() -> Iterator[dict[str, object]]:
    for pass_, head_dim, causal in product(PASSES, HEAD_DIMS, (False, True)):
        config = config_of(pass_, head_dim, causal)
        yield {
            "pass": pass_, "head_dim": head_dim, "causal": causal,
            "block_m": config.tile.block_m, "block_n": config.tile.block_n,
            "nvrtc": nvrtc_version(), "digest": digest_of(config.kernel()),
            **follow_form(config),
        }  # fmt: skip


def record() -> None:
    """Records the clocks of the forms that run by default. Half a minute."""
    records.write(LINES, COLUMNS, _record())
