"""Cache misses of a matrix product on a CPU: an exact LRU model, and closed forms.

The model replays the data references of ``kernels/beside/gemm_cpu.c`` through two levels of
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
            raise ValueError(f"{self.nbytes} bytes are not whole sets of {self.ways} lines of {self.line_bytes} bytes")

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
    """Misses of a fully associative LRU cache that starts empty, to leading order.

    L floats a line, Z lines. What a reference finds depends on whether everything touched since its
    line's last use still fits:

    naive   between neighbouring columns of C: n lines of B, n/L of A. If they do not fit, B misses
            at every reference, n³, and A's row comes again for every column, n³/L. Between rows of
            C: all of B. If that does not fit, B comes again for every row, n³/L, else once.
    tiled   a block of B comes for every row of blocks, n³/(block L); a block of A for every column
            of blocks unless a panel of A, one of B and a block of C fit together; C once.
    """
    per_line = cache.line_bytes // FLOAT_BYTES
    once = n * n / per_line  # one matrix
    if 3 * once <= cache.lines:
        return 3 * once
    if block is None:
        if n + 2 * n / per_line > cache.lines:
            return n**3 * (1 + 1 / per_line) + once
        return (n**3 / per_line if once + 2 * n / per_line > cache.lines else once) + 2 * once
    lines_a_row = -(-block // per_line)
    if 3 * block * lines_a_row > cache.lines:
        raise ValueError(f"three blocks of {block} do not fit into {cache.lines} lines")
    panels = block * n / per_line + n * lines_a_row + block * lines_a_row
    a_misses = once if panels <= cache.lines else n**3 / (block * per_line)
    return a_misses + n**3 / block**2 * lines_a_row + once
