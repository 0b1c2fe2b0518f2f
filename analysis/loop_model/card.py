"""How the thread blocks of a launch fill a card, and when the last one is done.

Clocks of a block come from the model of an SM; here they are put together. Blocks start in the
order of their numbers, each on the multiprocessor that is free first (a persistent block takes the
next tile the same way, when it counts them dynamically).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

#: Seconds from a launch to its first instruction and from its last to the next event: 2 us is what
#: TileSight (arXiv 2607.22432) uses for H100 and H200.
LAUNCH_S = 2e-6
#: Share of HBM's bandwidth that streams reach: 4.10 of 4.8 TB/s on an H200 (FlashGPU-Sim, job
#: 2119329), 3.02 of 3.35 on an H100 (TileSight).
HBM_SUSTAINED = 0.87
#: Bytes per second that all SMs together draw from L2: TileSight's value for an H200.
L2_BYTES_PER_S = 9.2e12


@dataclass(frozen=True)
class Clock:
    """Clock of the SMs, and how it is known."""

    hz: float
    origin: str


#: An H200 that runs attention at its power limit, as Nsight Compute saw it: 1.68 to 1.72 GHz.
H200_SUSTAINED = Clock(1.70e9, "sustained under load, 1.68 to 1.72 GHz seen by Nsight Compute")
#: The highest clock of an H200; kernels that stay below the power limit may run at it.
H200_NOMINAL = Clock(1.98e9, "highest clock of the data sheet")


def fill(clocks: Iterable[float], multiprocessors: int) -> float:
    """Clocks until the last block is done, one at a time on each multiprocessor."""
    free = [0.0] * multiprocessors
    for block in clocks:
        heapq.heapreplace(free, free[0] + block)
    return max(free)


def fill_shared(clocks: Iterable[float], multiprocessors: int, slots: int, slowdown: float) -> float:
    """Clocks until the last block is done where up to ``slots`` blocks share a multiprocessor.

    clocks: of each block, were it alone on one.
    slowdown: how many times as long a block takes beside ``slots`` - 1 others; beside fewer, in
        proportion.
    """
    waiting = iter(clocks)
    left: list[list[float]] = [[] for _ in range(multiprocessors)]
    for _ in range(slots):
        for here in left:
            here += islice(waiting, 1)

    def stretched(here: list[float]) -> float:
        """Until the first of them is done."""
        beside = (len(here) - 1) / (slots - 1) if slots > 1 else 0.0
        return min(here) * (1 + (slowdown - 1) * beside)

    ends = [(stretched(here), sm) for sm, here in enumerate(left) if here]
    heapq.heapify(ends)
    now = 0.0
    while ends:
        now, sm = heapq.heappop(ends)
        here, first = left[sm], min(left[sm])
        staying = [block - first for block in here if block > first]
        left[sm] = staying + list(islice(waiting, len(here) - len(staying)))
        if left[sm]:
            heapq.heappush(ends, (now + stretched(left[sm]), sm))
    return now


def copy_bytes_per_clock(port: float, clock: Clock, multiprocessors: int) -> float:
    """Bytes a clock that copies bring to one SM when all draw from L2 together."""
    return min(port, L2_BYTES_PER_S / multiprocessors / clock.hz)


def through(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """The broken line through points of ascending x, its last stretch prolonged.

    A block's clocks grow by the same number with every round once its pipeline is full.
    """
    if len(points) < 2:
        raise ValueError(f"a line needs two points, not {len(points)}")

    def at(x: float) -> float:
        pairs = list(pairwise(points))
        (x0, y0), (x1, y1) = next((p for p in pairs if x <= p[1][0]), pairs[-1])
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    return at
