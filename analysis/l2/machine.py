"""The L2 of a card, and how the blocks of a launch proceed: every parameter with its origin.

None is fitted to a traffic counter. Where nothing is published the value is the plainest one, the
entry says so, and what it decides is shown as a band (``PACES``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from analysis.hardware import Gpu

LINE_BYTES = 128
SECTOR_BYTES = 32
WAYS = 16

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "LINE_BYTES, SECTOR_BYTES": "Nsight Compute documentation, L2 cache: lines of 128 bytes in four sectors",
        "WAYS": "16 in microbenchmarks of Volta (Jia et al., arXiv 1804.06826) and in GPGPU-Sim's "
        "models of it; 20 in Accel-Sim 2.0's of H100. The predictions hardly depend on it",
        "hash": "runs of consecutive lines fill every set once, as the XOR and polynomial hashes "
        "of GPGPU-Sim do (Rau 1991); NVIDIA publishes none. Taken instead of a random one with the "
        "misses of a GB10 in sight (repro/experiments/bytes/gb10_misses.py)",
        "replacement": "least recently used; not published",
        "partitions": "A100 whitepaper (2020): each partition caches data for the SMs connected "
        "to it. That the line's home keeps a copy as well is our reading of it",
        "writes": "at the line's home, which keeps them until the line is evicted (write-back); "
        "cleaned before by no rule that anybody publishes (docs/pages/l2.md)",
        "sides": "every second SM on the same partition; the assignment is not published",
        "placement": "blocks start in launch order, one on each SM, then the second on each; the "
        "next one starts where one ends",
        "lone_speedup": "an SM's throughput does not depend on how many of its slots are filled "
        "(the upper end; the lower, 1, is a block that cannot use what its neighbour leaves)",
        "older_share, spread": "blocks of one length take equal time; not published",
    }
)


@dataclass(frozen=True)
class L2:
    """``partitions`` halves of ``sets`` sets of ``ways`` lines."""

    partitions: int
    sets: int
    ways: int = WAYS

    def __post_init__(self) -> None:
        if self.partitions not in (1, 2):
            raise ValueError(f"partitions={self.partitions} is neither 1 nor 2")
        if min(self.sets, self.ways) < 1:
            raise ValueError(f"sets={self.sets}, ways={self.ways}: both must be at least 1")

    @classmethod
    def of_bytes(cls, nbytes: int, partitions: int) -> L2:
        """The L2 of this size. One too small for a set has fewer ways."""
        lines = nbytes // LINE_BYTES // partitions
        ways = max(1, min(WAYS, lines))
        return cls(partitions, max(1, lines // ways), ways)

    @classmethod
    def of(cls, gpu: Gpu) -> L2:
        """The L2 of a card of ``analysis.hardware``."""
        return cls.of_bytes(gpu.l2_bytes, gpu.l2_partitions)

    @property
    def shared_bytes(self) -> int:
        """What data that all SMs read can occupy: each partition has its own copy."""
        return self.sets * self.ways * LINE_BYTES


@dataclass(frozen=True)
class Pace:
    """How fast blocks walk, in steps of equal work.

    lone_speedup: how much faster than with all slots of its SM busy a block can become when it has
    fewer neighbours; infinite: its SM's whole throughput is its own.
    older_share: what the oldest block of a full SM gets of the SM; None: as much as the others.
    spread: SMs take between 1 - spread and 1 + spread for a step, drawn once per SM from ``seed``.
    """

    lone_speedup: float = float("inf")
    older_share: float | None = None
    spread: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.lone_speedup < 1:
            raise ValueError(f"lone_speedup={self.lone_speedup} is below 1")
        if self.older_share is not None and not 0 < self.older_share < 1:
            raise ValueError(f"older_share={self.older_share} is outside (0, 1)")
        if not 0 <= self.spread < 1:
            raise ValueError(f"spread={self.spread} is outside [0, 1)")


PACES: Mapping[str, Pace] = MappingProxyType(
    {
        "equal shares of an SM": Pace(),
        "all in step": Pace(lone_speedup=1.0),
        "older block 1 % ahead": Pace(older_share=0.5025),
        "older block 2 % ahead": Pace(older_share=0.505),
        "SMs within 0.5 %": Pace(spread=0.005),
    }
)
"""The prediction's pace first; the rest is the band of what blocks may do instead."""
