"""What a simulated L2 gives in cases that have a formula.

Waves: blocks start as many at a time as the GPU holds, and those of a wave walk in step, so what
they share crosses HBM once a wave. A walk that fits is still there for the next wave; of one that
does not, a least-recently-used cache has dropped the beginning by then, and all of it comes again.

The lone tail: in the last wave some SMs hold fewer blocks than they could, and those blocks walk
faster. This is in no wave, and the simulator shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def lone_tail_bytes(walk_bytes: int, shared_bytes: int, speedup: float) -> float | None:
    """Bytes of one walk that blocks at normal pace fetch again behind blocks ``speedup`` as fast.

    Both start a walk of W bytes together. When a slow block comes to the byte at x, the fast ones
    were there at x / s; since then they have touched (s - 1) x more, and the slow ones x (1 - 1/s).
    The byte is lost once (s² - 1) / s x exceeds the shared capacity C, so all but
    C s / (s² - 1) is fetched again: W - 2C/3 at twice the pace. None unless W (1 - 1/s) > C: in a
    shorter walk the slow blocks catch up with what the fast ones left when they ended.
    """
    if speedup <= 1:
        return 0.0
    if walk_bytes * (1 - 1 / speedup) <= shared_bytes:
        return None
    return walk_bytes - shared_bytes * speedup / (speedup**2 - 1)


def lone_sms(blocks: int, sms: int, blocks_per_sm: int) -> tuple[int, int]:
    """SMs of the last wave that hold fewer blocks than the fullest one, and SMs that hold as many.

    Blocks of the last wave are dealt out one to each SM, then the second to each.
    """
    last = (blocks - 1) % (sms * blocks_per_sm) + 1
    fullest = -(-last // sms)
    full = last - (fullest - 1) * sms
    return (sms - full if fullest > 1 else 0), full


@dataclass(frozen=True)
class Waves:
    """``groups`` × ``per_group`` blocks, group after group, ``concurrent`` at a time."""

    groups: int
    per_group: int
    concurrent: int

    def rows_from_hbm(self, rows_walked: Callable[[int, int], int], walk_bytes: int, shared_bytes: int) -> int:
        """Rows fetched when each group's blocks walk that group's rows.

        rows_walked(first, last): rows that the group's blocks first..last walk together.
        walk_bytes: bytes of one group's whole walk.
        """
        fetched = 0
        for group in range(self.groups):
            start, end = group * self.per_group, (group + 1) * self.per_group
            known = 0  # rows this group has touched in earlier waves
            for wave in range(start // self.concurrent, (end - 1) // self.concurrent + 1):
                first = max(start, wave * self.concurrent) - start
                last = min(end, (wave + 1) * self.concurrent) - 1 - start
                rows = rows_walked(first, last)
                again = min(rows, known)
                lost = self._lost_fraction(wave, walk_bytes, shared_bytes) if known else 0.0
                fetched += rows - again + round(again * lost)
                known = max(known, rows)
        return fetched

    def _groups_in(self, wave: int) -> int:
        last_block = min((wave + 1) * self.concurrent, self.groups * self.per_group) - 1
        return last_block // self.per_group - wave * self.concurrent // self.per_group + 1

    def _lost_fraction(self, wave: int, walk_bytes: int, shared_bytes: int) -> float:
        """Share of a walk that L2 has dropped when this wave repeats the previous wave's.

        Between the two touches of the row at fraction x of the walk, the group itself touches one
        whole walk, every other group of the previous wave the last 1 - x of its walk, and every
        other group of this wave the first x. The row is lost where that exceeds the L2.
        """
        others_before = self._groups_in(wave - 1) - 1
        others_now = self._groups_in(wave) - 1
        at_start = (1 + others_before) * walk_bytes
        at_end = (1 + others_now) * walk_bytes
        low, high = min(at_start, at_end), max(at_start, at_end)
        if low > shared_bytes:
            return 1.0
        if high <= shared_bytes:
            return 0.0
        return (high - shared_bytes) / (high - low)
