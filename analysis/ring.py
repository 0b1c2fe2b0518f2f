"""Ring attention in formulas: bytes each rank sends, and how evenly causal work falls.

B batch, H query heads, Hkv key heads, N sequence, D head dimension, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis.shapes import ITEMSIZE, STAT_BYTES, AttentionShape


def ring_bytes(shape: AttentionShape, ranks: int, pass_: str) -> int:
    """Bytes each rank sends in a pass.

    Forward: its keys and values, P-1 times. Backward: the same again, and the fp32 sums dk and dv P
    times, because they travel on to the rank that owns the keys. Nothing moves for P = 1.
    """
    if shape.seqlen_q != shape.seqlen_k or shape.seqlen_k % ranks:
        raise ValueError(
            f"seqlen_q {shape.seqlen_q} and seqlen_k {shape.seqlen_k} must be equal and divide among {ranks} ranks"
        )
    if pass_ not in ("forward", "backward"):
        raise ValueError(f"pass_ must be 'forward' or 'backward', got {pass_!r}")
    if ranks == 1:
        return 0
    elements = 2 * shape.batch * shape.kv_heads * (shape.seqlen_k // ranks) * shape.head_dim
    sent = (ranks - 1) * elements * ITEMSIZE[shape.dtype]
    if pass_ == "backward":
        sent += ranks * elements * STAT_BYTES
    return sent


def causal_pairs(seqlen: int, ranks: int, placement: str) -> list[int]:
    """(query, key) pairs each rank computes under a causal mask, one head: N(N+1)/2 in all.

    "contiguous" gives the last rank nearly 2P-1 times the first one's work; "zigzag" (chunks r and
    2P-1-r of 2P) gives every rank the same.
    """
    if placement == "contiguous":
        owned: Sequence[Sequence[int]] = [[r] for r in range(ranks)]
        chunk = seqlen // ranks
    elif placement == "zigzag":
        owned = [[r, 2 * ranks - 1 - r] for r in range(ranks)]
        chunk = seqlen // (2 * ranks)
    else:
        raise ValueError(f"placement must be 'contiguous' or 'zigzag', got {placement!r}")
    if chunk * len(owned[0]) * ranks != seqlen:
        raise ValueError(f"seqlen {seqlen} does not divide into {placement} chunks on {ranks} ranks")
    return [sum(chunk * chunk * c + chunk * (chunk + 1) // 2 for c in mine) for mine in owned]
