"""When a softmax with a stale reference maximum overflows.

The optimistic forward (``kernels/flash_forward_sm90.cu``) takes a row's maximum over the first key
tiles it walks, the last keys, as the reference m of exp(s - m) / sum. That is softmax for any m.
What can go wrong is the size of the sum, so a tile whose sums pass 2^40 is flagged and done again.
"""

from __future__ import annotations

import math

#: log2 of the sum that flags a tile; fp32 and bf16 end at 2^128.
LIMIT_LOG2 = 40
PATTERNS = ("upward", "downward", "outlier")


def log2_of_sum(pattern: str, nats: float, seqlen_k: int, first_key: int) -> float:
    """log2 of a row's sum against the stale reference, for scores without noise.

    pattern: in the order the keys are walked, from the last to the first, scores grow by ``nats``
        in equal steps ("upward"), fall by it ("downward"), or are equal but for the key walked
        last, which is ``nats`` above the others ("outlier").
    first_key: the lowest key among those the reference is looked for in; keys from it to
        seqlen_k - 1 are.

    Raises ValueError for an unknown pattern, a negative drift or a key that does not exist.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern {pattern!r} is not one of {PATTERNS}")
    if not nats >= 0:
        raise ValueError(f"a drift of {nats} nats is negative")
    if not 0 <= first_key < seqlen_k:
        raise ValueError(f"first_key={first_key} is none of the {seqlen_k} keys")
    scores = [score(pattern, nats, seqlen_k, key) for key in range(seqlen_k)]
    reference, top = max(scores[first_key:]), max(scores)
    total = sum(math.exp(s - top) for s in scores)
    return (top - reference) / math.log(2) + math.log2(total)


def score(pattern: str, nats: float, seqlen_k: int, key: int) -> float:
    """What a pattern adds to the scores of a key, in nats."""
    if pattern == "outlier":
        return nats if key == 0 else 0.0
    share = key / max(seqlen_k - 1, 1)
    return nats * (1 - share if pattern == "upward" else share)


def flags(pattern: str, nats: float, seqlen_k: int, first_key: int) -> bool:
    """Whether every tile is flagged (else none is)."""
    return log2_of_sum(pattern, nats, seqlen_k, first_key) >= LIMIT_LOG2


def onset(pattern: str, seqlen_k: int, first_key: int) -> float:
    """The drift in nats from which tiles are flagged; infinity if none is within 1000 nats.

    By bisection to a millionth: the sum grows with the drift, or never passes the limit.
    """
    low, high = 0.0, 1000.0
    if not flags(pattern, high, seqlen_k, first_key):
        return math.inf
    while high - low > 1e-6:
        middle = (low + high) / 2
        if flags(pattern, middle, seqlen_k, first_key):
            high = middle
        else:
            low = middle
    return high
