"""Problems of different lengths, to be run packed by the Hopper kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flash_support import Problem, view

from analysis.packed import Lengths
from kernels.packed import Packed


def problems(
    lengths: Lengths, head_dim: int, dtype: str, causal: bool, heads: int = 2, kv_heads: int = 1, seed: int = 0
) -> list[Problem]:
    """One for each sequence."""
    return [
        Problem(
            heads=heads,
            kv_heads=kv_heads,
            seqlen_q=queries,
            seqlen_k=keys,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
            scale=0.125,
            seed=seed + number,
        )
        for number, (queries, keys) in enumerate(zip(lengths.queries, lengths.keys, strict=True))
    ]


def lengths_of(sequences: Sequence[Problem]) -> Lengths:
    return Lengths(tuple(p.seqlen_q for p in sequences), tuple(p.seqlen_k for p in sequences))


def packed_of(lengths: Lengths) -> Packed:
    q, k = (
        view(f"cu_seqlens_{side}", np.array(table, np.int32), "int32")
        for side, table in zip("qk", lengths.tables, strict=True)
    )
    return Packed(q, k, lengths)
