"""Packed sequences as the operator takes them: the lengths that the tables hold, checked.

The tables lie on the device of q. Each pass reads them once on the host before it launches, which
for CUDA tensors waits for the GPU: grids follow from the longest sequence, and a table that does
not fit would send a kernel beyond its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from analysis.packed import Lengths

__all__ = ["each_sequence", "lengths_of"]


def lengths_of(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Lengths:
    """The lengths of the sequences, read from the tables (for CUDA tensors this waits).

    Raises ValueError for a table that does not start at 0, falls, or does not end at the number of
    rows, naming both values.
    """
    return Lengths(
        _lengths("cu_seqlens_q", cu_seqlens_q, "q", q.shape[2]), _lengths("cu_seqlens_k", cu_seqlens_k, "k", k.shape[2])
    )


def _lengths(name: str, table: Tensor, of: str, rows: int) -> tuple[int, ...]:
    starts: list[int] = table.tolist()
    if starts[0] != 0:
        raise ValueError(f"{name}[0] is {starts[0]}, not 0")
    for at, (start, end) in enumerate(pairwise(starts)):
        if end < start:
            raise ValueError(f"{name} falls from {start} to {end} at entry {at + 1}")
    if starts[-1] != rows:
        raise ValueError(f"{name} ends at {starts[-1]}, {of} has {rows} rows")
    return tuple(end - start for start, end in pairwise(starts))


def each_sequence(lengths: Lengths) -> Iterator[tuple[int, slice, slice]]:
    """(number, its queries, its keys) of every sequence, as places in the packed rows."""
    of_queries, of_keys = lengths.tables
    for at in range(lengths.sequences):
        yield at, _between(of_queries, at), _between(of_keys, at)


def _between(table: Sequence[int], at: int) -> slice:
    return slice(table[at], table[at + 1])
