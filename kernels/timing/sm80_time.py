"""Clocks and seconds of the sm_80 flash kernels, on an A100 and on Hopper, from their machine code.

What a block takes alone is a line in the rounds of its loop; how much longer it takes beside as
many others as an SM holds is one number (``kernels.timing.followed_warps``). Both are on record,
of each card, with a digest of the source, so that a prediction needs neither compiler nor time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from analysis.arguments import checked
from analysis.hardware import A100_80GB, H200, Gpu
from analysis.loop_model import ampere, card, hopper_warps
from analysis.loop_model.parameters import Machine
from analysis.packed import Lengths
from analysis.shapes import AttentionShape, Tile
from analysis.tile_loop import tile_loop
from kernels.flash_config import DTYPE_CODE
from kernels.launch import Kernel
from kernels.launches import Device, launches_of
from kernels.launching import plan
from kernels.timing import records
from kernels.timing.followed_blocks import Features
from kernels.timing.hopper_time import seconds_around
from kernels.timing.records import Recorded, digest_of_source

PASSES = ("forward", "backward")


@dataclass(frozen=True, eq=False)
class Target:
    """A card whose SM the model knows, the code that it takes, and the record of its clocks.

    name: of the record, for ``python -m kernels.timing``.
    """

    name: str
    arch: str
    gpu: Gpu
    machine: Machine
    lines: Path

    @property
    def device(self) -> Device:
        """What a driver asks of it."""
        return Device(self.arch.removeprefix("sm_"), self.gpu.shared_bytes_per_block, self.gpu.sms)


_FOLDER = Path(__file__).parent
ON_A100 = Target("ampere", "sm_80", A100_80GB, ampere.MACHINE, _FOLDER / "ampere_lines.csv")
ON_H200 = Target("sm80-on-hopper", "sm_90", H200, hopper_warps.MACHINE, _FOLDER / "sm80_on_hopper_lines.csv")
TARGETS = (ON_A100, ON_H200)


@checked
def target_of(gpu: Gpu) -> Target | None:
    """The target whose SM a card has, None of other compute capabilities."""
    return next((each for each in TARGETS if each.gpu.compute_capability == gpu.compute_capability), None)


@cache
def digest_of(kernel: Kernel) -> str:
    """Of all that a kernel's machine code follows from, but for the compiler; of bf16 that of
    fp16, but with a softcap, whose tanh is the type's."""
    macros = dict(kernel.macros)
    if macros["DTYPE"] == DTYPE_CODE["bf16"] and "SOFTCAP" not in macros:
        macros["DTYPE"] = DTYPE_CODE["fp16"]
    return digest_of_source(kernel, macros)


def recorded(kernel: Kernel, target: Target) -> Recorded:
    """What is on record of a kernel. LookupError where that is nothing: a form that does not run by
    default, or another state of its source."""
    row = records.find(target.lines, digest=digest_of(kernel))
    if row is None:
        raise LookupError(
            f"no clocks in {target.lines.name} for this {kernel.entry}: "
            f"python -m kernels.timing {target.name} records those of the default forms"
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
    kernel: Kernel, pass_: str, shape: AttentionShape, target: Target, sms: int, lengths: Lengths | None = None
) -> float:
    """Clocks of the main kernel on a card of ``sms`` multiprocessors. Errors as ``recorded``."""
    found = recorded(kernel, target)
    assert found.tile is not None
    return found.clocks(walked(pass_, found.tile, shape, lengths), sms)


@checked
def seconds(
    kernel: Kernel,
    pass_: str,
    shape: AttentionShape,
    target: Target,
    *,
    sms: int,
    hbm_bytes_per_s: float,
    clock: card.Clock,
    lengths: Lengths | None = None,
) -> float:
    """Time of a pass, as if its kernels did not wait for HBM: the main one, and around a backward
    two that only move bytes.

    kernel: the main one. lengths: of packed sequences. Errors as ``recorded``.
    """
    main = clocks(kernel, pass_, shape, target, sms, lengths) / clock.hz
    return main + seconds_around(pass_, shape, 1, hbm_bytes_per_s)


def main_launch(
    shape: AttentionShape,
    pass_: str,
    target: Target,
    features: Features = (),
    lengths: Lengths | None = None,
    tile: Tile | None = None,
) -> plan.Launch:
    """The kernel that walks the tile loop, as the target would run it."""
    return launches_of(
        "flash",
        shape,
        pass_,
        target.device,
        tile=tile,
        softcap="softcap" in features,
        alibi="alibi" in features,
        lengths=lengths,
    ).main


def on_h200(shape: AttentionShape, pass_: str, features: Features = (), lengths: Lengths | None = None) -> float:
    """:func:`seconds` of what an H200 would run, under load.

    features: of the scores; a window is the shape's own.
    """
    return seconds(
        main_launch(shape, pass_, ON_H200, features, lengths).kernel,
        pass_,
        shape,
        ON_H200,
        sms=H200.sms,
        hbm_bytes_per_s=H200.hbm_bandwidth_bytes_per_s,
        clock=card.H200_SUSTAINED,
        lengths=lengths,
    )
