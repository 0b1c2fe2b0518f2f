"""Philox4x32-10 and the dropout mask in NumPy: the same bits as ``include/philox.cuh``.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11. The generator is
counter-based: a word is a function of a counter and a key, so the backward pass of attention
recomputes the mask of the forward pass and stores nothing.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from analysis.arguments import checked
from kernels.launch import Size, Word

Words = npt.NDArray[np.uint32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def philox_4x32_10(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Four words per counter. The counter's words broadcast against each other."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in counter))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return tuple(c.astype(np.uint32) for c in (c0, c1, c2, c3))  # type: ignore[return-value]


@checked
def drop_threshold(dropout_p: float) -> int:
    """A weight is dropped when its word is below this: floor(p · 2³²), and 2³² - 1 for p = 1.

    ValueError unless 0 ≤ p ≤ 1.
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p={dropout_p} is outside [0, 1]")
    return min(math.floor(dropout_p * 2**32), 2**32 - 1)


@checked
def keep_scale(dropout_p: float) -> float:
    """What a kept weight is multiplied by: 1 / (1 - p). 0 for p = 1, where nothing is kept."""
    return 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)


@checked
def kept_weights(
    seed: Word, dropout_p: float, batch: Size, heads: Size, seqlen_q: Size, seqlen_k: Size
) -> npt.NDArray[np.bool_]:
    """The dropout mask, True where a weight is kept; (B, H, Nq, Nk).

    It depends on (seed, batch, head, row, column) only: a larger problem has the mask of a smaller
    one in its corner.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed} is outside [0, 2**64)")
    b, h, row, col = np.ogrid[:batch, :heads, :seqlen_q, :seqlen_k]
    words = philox_4x32_10(
        (8 * (col // 16) + col % 8, 8 * (row // 16) + row % 8, h, b), (seed & 0xFFFFFFFF, seed >> 32)
    )
    word = np.choose(2 * (row // 8 % 2) + col // 8 % 2, words)
    return (word >= drop_threshold(dropout_p)) & (dropout_p < 1.0)
