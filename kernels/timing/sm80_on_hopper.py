"""Clocks and seconds of the sm_80 flash kernels on an H200, predicted from their machine code.

What dispatch weighs the Hopper kernels against. ``python -m kernels.timing sm80-on-hopper``
compiles the sm_80 kernels for sm_90 and follows one block of small problems, as
``kernels.timing.ampere_time`` does for an A100, through the model of an SM that runs products of
warps (``analysis.loop_model.hopper_warps``). ``sm80_on_hopper_lines.csv`` keeps the clocks with a
digest of the source. Minutes; needs NVRTC, nvdisasm and a C compiler, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from analysis.hardware import H200
from analysis.loop_model import card, hopper_warps
from analysis.loop_model.program import Program
from analysis.packed import Lengths
from analysis.shapes import AttentionShape
from analysis.sums.packed import ENTRY_BYTES
from kernels.building.compile import nvrtc_version
from kernels.flash_config import FlashConfig, configure
from kernels.hopper import HEAD_DIMS, BackwardForm
from kernels.launch import Kernel
from kernels.launches import Device, launches_of
from kernels.launching import plan
from kernels.sass import loops
from kernels.sass.operands import Launch
from kernels.timing import records
from kernels.timing.ampere_time import (
    PASSES,
    ROUNDS,
    SHARED_ROUNDS,
    digest_of,
    follow,
    walked,
)
from kernels.timing.followed_blocks import BEFORE, code_of, dtype_of, launch_of
from kernels.timing.hopper_time import Features, featured, options_of, seconds_around
from kernels.timing.records import Recorded, clock_columns

ARCH = "sm_90"
DEVICE = Device("90", H200.shared_bytes_per_block, H200.sms)
LINES = Path(__file__).with_name("sm80_on_hopper_lines.csv")
PACKED = "packed"


@dataclass(frozen=True)
class Kind:
    """A kernel on record. features: of the scores; with ``packed`` none."""

    pass_: str
    head_dim: int
    causal: bool
    features: Features = ()
    packed: bool = False

    @property
    def name(self) -> str:
        """What the record calls its options."""
        return PACKED if self.packed else " ".join(self.features)

    @property
    def dtype(self) -> str:
        """Of q, k and v."""
        return dtype_of(self.features)

    @property
    def config(self) -> FlashConfig:
        """What the driver runs it with on an H200."""
        options: dict[str, Any] = dict.fromkeys(options_of(self.features), True)
        if self.packed:
            options[PACKED] = True
        return configure(
            self.pass_, self.dtype, self.head_dim, limit=H200.shared_bytes_per_block,
            causal=self.causal, **options,
        )  # fmt: skip


def kinds() -> Iterator[Kind]:
    """All that is recorded: what the Hopper kernels have clocks for as well, and packed."""
    for pass_ in PASSES:
        for head_dim, causal in product(HEAD_DIMS[pass_], (False, True)):
            yield Kind(pass_, head_dim, causal)
            if head_dim <= 128:
                yield Kind(pass_, head_dim, causal, packed=True)
    for form, features in featured():
        pass_ = "backward" if isinstance(form, BackwardForm) else "forward"
        for causal in (False, True):
            yield Kind(pass_, form.head_dim, causal, features)


def main_launch(
    shape: AttentionShape, pass_: str, features: Features = (), lengths: Lengths | None = None
) -> plan.Launch:
    """The kernel that walks the tile loop, as an H200 would run it."""
    return launches_of(
        "flash", shape, pass_, DEVICE,
        softcap="softcap" in features, alibi="alibi" in features, lengths=lengths,
    ).main  # fmt: skip


def _small(kind: Kind, rounds: int) -> AttentionShape:
    """One head whose first block walks ``rounds`` tiles. A window is followed as Hopper's forms
    are: either of its ends cuts a tile."""
    tile, some = kind.config.tile, AttentionShape(
        1, 1, 1, 1, kind.head_dim, dtype=kind.dtype, causal=kind.causal
    )  # fmt: skip
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


def _launch(kind: Kind, rounds: int) -> Launch:
    """Block 0 of one head, whose loop has so many rounds."""
    shape, lengths, memory = _small(kind, rounds), None, {}
    if kind.packed:
        lengths = Lengths.equal([shape.seqlen_q])
        shape = lengths.packed_shape(shape)
        # Both tables, which hold the same, lie where the lower half of an address is 0.
        memory = {ENTRY_BYTES * at: start for at, start in enumerate(lengths.tables[0])}
    main = main_launch(shape, kind.pass_, kind.features, lengths)
    return replace(launch_of(main), architecture=ARCH, memory=memory)


def followed(kind: Kind, rounds: int) -> Program:
    """What the warps of that block execute."""
    return loops.program(code_of(kind.config.kernel(), ARCH), _launch(kind, rounds))


def recorded(kernel: Kernel) -> Recorded:
    """What is on record of a kernel; LookupError for another form or state of its source."""
    row = records.find(LINES, digest=digest_of(kernel))
    if row is None:
        raise LookupError(
            f"no clocks in {LINES.name} for this {kernel.entry}: "
            "python -m kernels.timing sm80-on-hopper"
        )
    return Recorded.read(row)


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
    """Predicted time of a pass on a Hopper card, as if its kernels did not wait for HBM.

    kernel: the main one. lengths: of packed sequences. Raises LookupError as ``recorded``.
    """
    found = recorded(kernel)
    assert found.tile is not None
    clocks = found.clocks(walked(pass_, found.tile, shape, lengths), sms)
    return clocks / clock.hz + seconds_around(pass_, shape, 1, hbm_bytes_per_s)


def on_h200(
    shape: AttentionShape, pass_: str, features: Features = (), lengths: Lengths | None = None
) -> float:
    """:func:`seconds` of what an H200 would run, under load.

    features: of the scores; a window is the shape's own.
    """
    return seconds(
        main_launch(shape, pass_, features, lengths).kernel, pass_, shape, sms=H200.sms,
        hbm_bytes_per_s=H200.hbm_bandwidth_bytes_per_s, clock=card.H200_SUSTAINED, lengths=lengths,
    )  # fmt: skip


def _record() -> Iterator[dict[str, object]]:
    for kind in kinds():
        config = kind.config
        programs = {n: followed(kind, n) for n in lengths_of(kind)}
        blocks = config.fit(H200).blocks_per_sm
        yield {
            "pass": kind.pass_, "head_dim": kind.head_dim, "causal": kind.causal,
            "options": kind.name, "block_m": config.tile.block_m,
            "block_n": config.tile.block_n, "nvrtc": nvrtc_version(),
            "digest": digest_of(config.kernel()),
            **follow(programs, SHARED_ROUNDS, blocks, hopper_warps.MACHINE),
        }  # fmt: skip


def record() -> None:
    """Records the clocks of every kind. Minutes."""
    columns = ("pass", "head_dim", "causal", "options", "block_m", "block_n", "nvrtc", "digest",
               "blocks_per_sm", "slowdown", *clock_columns(ROUNDS))  # fmt: skip
    records.write(LINES, columns, _record())
