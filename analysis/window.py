"""Which keys a query sees: causal mask, sliding window and attention sinks.

With d = i + Nk - Nq, the key on query i's diagonal (aligned bottom-right), query i sees key j when

    (d - left <= j <= d + right  or  j < sinks)  and  (j <= d, if causal).

A bound that is None is unlimited; under a causal mask ``right`` is 0 whatever it was. The keys of a
row are therefore those of an interval and the sinks before it, and so are the key tiles of a query
tile; the query tiles of a key tile are an interval alone, which ends with the last query where the
tile holds a sink. Both follow from two bounds, and are the loops of
``kernels/include/window.cuh``.

Windows are those of Longformer (Beltagy et al. 2020) and Mistral 7B (Jiang et al. 2023), sinks
those of StreamingLLM (Xiao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.arguments import whole

Counts = npt.NDArray[np.int64]
Sides = tuple[int | None, int | None]


def sides(window: Any) -> Sides:
    """(left, right) as ints or None; None stands for (None, None).

    TypeError for anything but two whole numbers or None, ValueError for a negative one: some
    libraries write -1 where None is meant here.
    """
    if window is None:
        return None, None
    if isinstance(window, str) or not isinstance(window, Sequence) or len(window) != 2:
        raise TypeError(f"window must be (left, right), two whole numbers or None for unlimited, got {window!r}")
    found: list[int | None] = []
    for name, side in zip(("left", "right"), window, strict=True):
        if side is not None:
            side = whole(f"window {name}", side)
            if side < 0:
                raise ValueError(f"window {name}={side} is below 0; None is unlimited")
        found.append(side)
    return found[0], found[1]


@dataclass(frozen=True)
class Window:
    """A window on (seqlen_q, seqlen_k), both bounds as numbers: what the kernels are given.

    left, right: keys before and after the diagonal; as many as there can be where unlimited.
    sinks: keys from the first that a window hides from nobody.
    causal: nothing beyond the diagonal is seen, sinks neither.
    """

    seqlen_q: int
    seqlen_k: int
    left: int
    right: int
    sinks: int
    causal: bool

    @classmethod
    def of(cls, seqlen_q: int, seqlen_k: int, *, causal: bool, window: Sides, sinks: int) -> Window:
        """Unlimited bounds as seqlen_k and seqlen_q, which no query's keys lie beyond."""
        left, right = window
        return cls(
            seqlen_q,
            seqlen_k,
            seqlen_k if left is None else min(left, seqlen_k),
            0 if causal else seqlen_q if right is None else min(right, seqlen_q),
            min(sinks, seqlen_k),
            causal,
        )

    @property
    def hides(self) -> bool:
        """Whether it takes out a pair that the causal mask leaves."""
        without = Window.of(self.seqlen_q, self.seqlen_k, causal=self.causal, window=(None, None), sinks=0)
        return self != without and self.visible_pairs != without.visible_pairs

    @property
    def _diagonal(self) -> int:
        return self.seqlen_k - self.seqlen_q

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs that take part. Each term counts, over all rows, the keys before a
        bound that moves by one a row."""
        rows, keys, sinks = self.seqlen_q, self.seqlen_k, self.sinks
        start = self._diagonal - self.left
        end = self._diagonal + self.right + 1
        window = _before(rows, end, keys) - _before(rows, start, keys)
        sinks_to_the_left = _before(rows, start, sinks)
        sinks_to_the_right = 0 if self.causal else rows * sinks - _before(rows, end, sinks)
        return window + sinks_to_the_left + sinks_to_the_right

    @property
    def rows_that_see(self) -> int:
        """Queries with a key at all."""
        if self.sinks and not self.causal:
            return self.seqlen_q
        return min(self.seqlen_q, self.seqlen_k + self.right)

    @property
    def keys_seen(self) -> int:
        """Keys with a query at all: the sinks, and from the first query's window to the end."""
        in_windows = min(self.seqlen_k, self.seqlen_q + self.left)
        return in_windows + min(self.sinks, self.seqlen_k - in_windows)

    def seen_before(self, keys: npt.ArrayLike) -> Counts:
        """(Nq, len(keys)): of the keys before each of ``keys``, how many each query sees."""
        limit = np.asarray(keys, dtype=np.int64)[None, :]
        rows = np.arange(self.seqlen_q)[:, None] + self._diagonal
        start = np.clip(rows - self.left, 0, self.seqlen_k)
        end = np.clip(rows + self.right + 1, 0, self.seqlen_k)
        sinks = np.minimum(limit, self.sinks)
        seen = np.minimum(limit, end) - np.minimum(limit, start) + np.minimum(sinks, start)
        if not self.causal:
            seen = seen + sinks - np.minimum(sinks, end)
        return np.asarray(seen, dtype=np.int64)

    def key_tiles(self, block_m: int, block_n: int) -> tuple[Counts, Counts, Counts]:
        """(sink tiles, first, end) of every query tile: it meets the key tiles below the first
        number and those from the second to the third, without it."""
        first_row = np.arange(0, self.seqlen_q, block_m, dtype=np.int64)
        last_row = np.minimum(first_row + block_m, self.seqlen_q) - 1
        reach = np.full_like(first_row, self.seqlen_k)
        if self.causal:
            reach = np.clip(last_row + self._diagonal + 1, 0, self.seqlen_k)
        sinks = -(-np.minimum(self.sinks, reach) // block_n)
        start = np.maximum(first_row + self._diagonal - self.left, 0)
        keys = np.clip(last_row + self._diagonal + self.right + 1, 0, self.seqlen_k)
        end = np.maximum(-(-keys // block_n), sinks)
        first = np.where(keys > start, np.maximum(start // block_n, sinks), end)
        return sinks, first, end

    def query_tiles(self, block_m: int, block_n: int) -> tuple[Counts, Counts]:
        """(first, end) of every key tile: the query tiles that meet it."""
        first_key = np.arange(0, self.seqlen_k, block_n, dtype=np.int64)
        last_key = np.minimum(first_key + block_n, self.seqlen_k) - 1
        holds_a_sink = first_key < self.sinks
        start = np.maximum(first_key - self._diagonal - self.right, 0)
        if not self.causal:
            start = np.where(holds_a_sink, 0, start)
        rows = np.minimum(last_key - self._diagonal + self.left + 1, self.seqlen_q)
        rows = np.where(holds_a_sink, self.seqlen_q, rows)
        end = np.where(rows > start, -(-rows // block_m), start // block_m)
        return start // block_m, end


def _before(rows: int, bound: int, most: int) -> int:
    """Sum over i < rows of i + bound, cut to 0 … most."""

    def below(x: int) -> int:
        """Sum of y, cut to 0 … most, over 0 <= y < x."""
        inside = min(max(x, 0), most)
        return inside * (inside - 1) // 2 + max(x - most, 0) * most

    return below(bound + rows) - below(bound)
