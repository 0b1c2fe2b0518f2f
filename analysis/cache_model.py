"""Cache misses of a matrix product on a CPU: an exact LRU model, and closed forms.

The model replays the data references of ``kernels/gemm_cpu.c`` through two levels of
set-associative caches with least-recently-used replacement, write-allocate, the last level seeing
the first one's misses: what cachegrind simulates for the compiled program. The closed forms say
what a fully associative cache of Z lines would do and why tiling helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

FLOAT_BYTES = 4

#: Float addresses of the three arrays.
A, B, C = 0, 1 << 20, 1 << 21


@dataclass(frozen=True)
class Cache:
    """Size in bytes, ways, bytes a line."""

    nbytes: int
    ways: int
    line_bytes: int = 64

    def __post_init__(self) -> None:
        if min(self.nbytes, self.ways, self.line_bytes) < 1:
            raise ValueError(f"cache sizes must be positive: {self}")
        if self.nbytes % (self.ways * self.line_bytes):
            raise ValueError(
                f"{self.nbytes} bytes are not whole sets of {self.ways} lines of "
                f"{self.line_bytes} bytes"
            )

    @property
    def sets(self) -> int:
        """Number of sets."""
        return self.nbytes // (self.ways * self.line_bytes)

    @property
    def lines(self) -> int:
        """Number of lines."""
        return self.nbytes // self.line_bytes


@dataclass(frozen=True)
class Misses:
    """Data references and the misses of both levels."""

    references: int
    first: int
    last: int


def references(n: int, block: int | None) -> Iterator[int]:
    """Float addresses of ``naive_gemm`` (block None) or ``tiled_gemm``, in program order.

    Arrays a, b, c start at multiples of a large power of two, as in the program.
    """
    step = n if block is None else block
    for ii in range(0, n, step):
        for jj in range(0, n, step):
            for kk in range(0, n, step):
                for i in range(ii, min(ii + step, n)):
                    for j in range(jj, min(jj + step, n)):
                        yield C + i * n + j
                        for k in range(kk, min(kk + step, n)):
                            yield A + i * n + k
                            yield B + k * n + j
                        yield C + i * n + j


class CachePair:
    """Two levels of LRU caches, empty at first; counts as addresses pass through."""

    def __init__(self, first: Cache, last: Cache) -> None:
        if first.line_bytes != last.line_bytes:
            raise ValueError(f"line sizes differ: {first.line_bytes} and {last.line_bytes} bytes")
        self._first, self._last = first, last
        # A dict keeps insertion order: its first key is the line used longest ago.
        self._sets_first: list[dict[int, None]] = [{} for _ in range(first.sets)]
        self._sets_last: list[dict[int, None]] = [{} for _ in range(last.sets)]

    def replay(self, addresses: Iterable[int]) -> Misses:
        """References and misses of these float addresses, from the present state on."""
        floats_a_line = self._first.line_bytes // FLOAT_BYTES
        sets_first, sets_last = self._sets_first, self._sets_last
        count = misses_first = misses_last = 0
        for address in addresses:
            count += 1
            line = address // floats_a_line
            ways = sets_first[line % self._first.sets]
            if line in ways:
                del ways[line]
                ways[line] = None
                continue
            misses_first += 1
            if len(ways) == self._first.ways:
                del ways[next(iter(ways))]
            ways[line] = None
            ways = sets_last[line % self._last.sets]
            if line in ways:
                del ways[line]
            else:
                misses_last += 1
                if len(ways) == self._last.ways:
                    del ways[next(iter(ways))]
            ways[line] = None
        return Misses(count, misses_first, misses_last)


def predict_misses(n: int, block: int, first: Cache, last: Cache) -> dict[str, Misses]:
    """Exact misses of ``naive_gemm`` and ``tiled_gemm`` inside the program.

    The program writes a and b, multiplies naively, negates c, multiplies in blocks; the caches keep
    what each part leaves behind.
    """
    caches = CachePair(first, last)
    caches.replay(array + i for i in range(n * n) for array in (A, B))
    naive = caches.replay(references(n, None))
    caches.replay(C + i for i in range(n * n))
    return {"naive_gemm": naive, "tiled_gemm": caches.replay(references(n, block))}


def closed_form(n: int, block: int | None, cache: Cache) -> float:
    """Misses of a fully associative LRU cache, to leading order. L floats a line, Z lines.

    naive: between two uses of a line of B (neighbouring columns j) n lines of B and n/L of A pass.
    If they do not fit, B misses at every reference, n³, and A once a line and column, n³/L. If they
    fit but B does not, B misses once a line and row of A, n³/L. If everything fits: once a line.
    tiled: a block of A and one of B are loaded per block product, n³/(block L) each when a block's
    row is whole lines, and C once, n²/L. A's half lines serve the next block, B's do not.
    """
    per_line = cache.line_bytes // FLOAT_BYTES
    once = 3 * n * n / per_line
    if once <= cache.lines:
        return once
    if block is None:
        if n + 2 * n / per_line > cache.lines:
            return n**3 * (1 + 1 / per_line) + n * n / per_line
        return n**3 / per_line + 2 * n * n / per_line
    lines_a_row = -(-block // per_line)
    if 3 * block * lines_a_row > cache.lines:
        raise ValueError(f"three blocks of {block} do not fit into {cache.lines} lines")
    return n**3 / (block * per_line) + n**3 / block**2 * lines_a_row + n * n / per_line
