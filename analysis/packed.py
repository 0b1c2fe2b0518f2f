"""Sequences of different lengths packed one after another, without padding.

All tokens lie along one axis, (1, H, total, D); two tables say where each sequence starts
(``cu_seqlens``: 0 and the sums of the lengths so far). Queries of a sequence see keys of the same
sequence alone, and a sequence is what it would be by itself: its causal mask, its window and the
distances of ALiBi are aligned at the end of its own keys.

Whatever is counted of a packed batch (bytes, operations, pairs) is the sum over its sequences, as
no two share anything. The one thing that comes on top are the tables. :func:`summed` is that sum;
equal sequences are counted together, as a batch of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from analysis.arguments import whole
from analysis.shapes import AttentionShape


@dataclass(frozen=True)
class Lengths:
    """How many queries and keys each sequence has; either may be 0.

    Raises:
        ValueError, TypeError: two lists of different length, or what is no whole number of at
            least 0, naming the values.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("queries", "keys"):
            values = tuple(whole(name, length, least=0) for length in getattr(self, name))
            object.__setattr__(self, name, values)
        if len(self.queries) != len(self.keys):
            raise ValueError(f"{len(self.queries)} lengths of queries but {len(self.keys)} of keys")

    @classmethod
    def equal(cls, lengths: Iterable[int]) -> Lengths:
        """As many keys as queries in each sequence: self-attention."""
        listed = tuple(lengths)
        return cls(listed, listed)

    @property
    def sequences(self) -> int:
        """How many there are."""
        return len(self.queries)

    @property
    def alike(self) -> bool:
        """All sequences have as many queries and as many keys."""
        return len(set(zip(self.queries, self.keys, strict=True))) == 1

    @property
    def total_q(self) -> int:
        """Queries of all sequences."""
        return sum(self.queries)

    @property
    def total_k(self) -> int:
        """Keys of all sequences."""
        return sum(self.keys)

    @property
    def longest_q(self) -> int:
        """Queries of the sequence that has most; 0 where there is none."""
        return max(self.queries, default=0)

    @property
    def longest_k(self) -> int:
        """Keys of the sequence that has most; 0 where there is none."""
        return max(self.keys, default=0)

    @property
    def tables(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """cu_seqlens_q and cu_seqlens_k: where each sequence starts, and at last the total."""
        return (tuple(accumulate(self.queries, initial=0)), tuple(accumulate(self.keys, initial=0)))

    def numbered_tiles(self, block: int, *, keys: bool = False) -> int:
        """How many numbers the Hopper kernels give to tiles of ``block`` queries, or keys: of each
        sequence as many as it has tiles, and at most one more (``include/packed_sm90.cuh``)."""
        return (self.total_k if keys else self.total_q) // block + self.sequences

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """(queries, keys) of the sequences, equal ones once."""
        return set(zip(self.queries, self.keys, strict=True))

    def shapes(self, shape: AttentionShape) -> tuple[AttentionShape, ...]:
        """Batches of equal sequences that have both queries and keys; ``shape`` gives the rest."""
        return _shapes(self, shape)

    def check(self, shape: AttentionShape) -> None:
        """ValueError unless ``shape`` is that of the packed arrays: (1, H, total, D)."""
        for name, total, wanted in (
            ("batch", 1, shape.batch),
            ("seqlen_q", self.total_q, shape.seqlen_q),
            ("seqlen_k", self.total_k, shape.seqlen_k),
        ):
            if wanted != total:
                raise ValueError(f"{name}={wanted}, the packed sequences make it {total}")

    def packed_shape(self, shape: AttentionShape) -> AttentionShape:
        """The shape of the packed arrays. ValueError where all queries or all keys are missing."""
        return replace(shape, batch=1, seqlen_q=self.total_q, seqlen_k=self.total_k)


@lru_cache(maxsize=256)  # bytes, operations and bounds of a batch ask for them one after another
def _shapes(lengths: Lengths, shape: AttentionShape) -> tuple[AttentionShape, ...]:
    counted = Counter(zip(lengths.queries, lengths.keys, strict=True))
    return tuple(
        replace(shape, batch=times, seqlen_q=queries, seqlen_k=keys)
        for (queries, keys), times in sorted(counted.items())
        if queries and keys
    )


def summed(count: Callable[[AttentionShape], int], shape: AttentionShape, lengths: Lengths) -> int:
    """The sum over the sequences of what ``count`` says of one; those without queries or keys
    count nothing."""
    return sum(count(each) for each in lengths.shapes(shape))
