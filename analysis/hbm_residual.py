"""Splitting a DRAM counter of one kernel into parts that add up to it, byte for byte.

    reads  = compulsory + read again + sector padding + unexplained
    writes = compulsory + written again       + sector padding - late write-back + unexplained

Everything but the counter is a formula of ``analysis.hbm``; nothing is fitted, and what the
formulas do not give is called unexplained. Late write-back: dirty lines that leave L2 after the
counter was read, which is what a write counter lacks, up to the size of L2. ``absorbed`` stands
beside the sum: bytes that crossed the SM boundary and never reached DRAM (negative where DRAM saw
more than the SMs asked for).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SECTOR_BYTES = 32
"""The unit in which L2 and DRAM exchange bytes."""
PARTS = ("compulsory", "again", "padding", "late", "unexplained")


@dataclass(frozen=True)
class Residual:
    """Bytes of one kernel in one direction. ``late`` is zero or negative."""

    counter: int
    compulsory: int
    again: int
    padding: int
    late: int
    unexplained: int
    absorbed: int | None

    def __post_init__(self) -> None:
        total = sum(getattr(self, part) for part in PARTS)
        if total != self.counter:
            raise AssertionError(f"parts add up to {total}, the counter says {self.counter}")


def padding_bytes(tensors: Mapping[str, int]) -> int:
    """What whole sectors add to contiguous tensors of these bytes; zero for multiples of 32."""
    return sum(-bytes_ % SECTOR_BYTES for bytes_ in tensors.values())


def split(
    direction: str,
    counter: int,
    once: Mapping[str, int],
    waved: Mapping[str, int],
    l2_bytes: int,
    boundary: int | None = None,
) -> Residual:
    """Split one counter.

    direction: "read" or "write". once, waved: predicted bytes by tensor, each once
    (``analysis.hbm.compulsory_hbm``) and with what is moved again (``predict_hbm``); both
    empty for a kernel that no formula knows. boundary: bytes counted at the SM boundary.
    """
    if direction not in ("read", "write"):
        raise ValueError(f"direction={direction!r} is neither 'read' nor 'write'")
    compulsory, all_of_it = sum(once.values()), sum(waved.values())
    padding = padding_bytes(once)
    missing = all_of_it + padding - counter
    late = -min(max(missing, 0), l2_bytes) if direction == "write" else 0
    return Residual(
        counter=counter,
        compulsory=compulsory,
        again=all_of_it - compulsory,
        padding=padding,
        late=late,
        unexplained=-missing - late,
        absorbed=None if boundary is None else boundary - counter,
    )
