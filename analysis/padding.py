"""What padding costs: batches drawn from a histogram of lengths, padded or packed.

A batch padded to L runs B sequences of L rows, a packed one its own lengths. Attention at the SM
boundary moves Θ(n²) bytes for n rows and the rest Θ(n), so that padding costs a batch

    B · f(L) / Σ f(n_s),   between B · L / Σ n_s (short rows) and B · L² / Σ n_s² (long ones)

with f the bytes of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from analysis.packed import Lengths


def draw(histogram: Mapping[int, int], sequences: int, seed: int) -> tuple[int, ...]:
    """Lengths of sequences drawn independently, each in proportion to its count.

    Raises ValueError for a histogram without sequences.
    """
    lengths = np.array(sorted(histogram))
    counts = np.array([histogram[int(n)] for n in lengths], dtype=float)
    if not len(lengths) or counts.sum() <= 0:
        raise ValueError(f"histogram={dict(histogram)} has no sequences")
    chosen = np.random.default_rng(seed).choice(lengths, sequences, p=counts / counts.sum())
    return tuple(int(n) for n in chosen)


def batches(lengths: tuple[int, ...], size: int) -> list[Lengths]:
    """The sequences in batches of ``size``, in their order. ValueError unless they fill them."""
    if size < 1 or len(lengths) % size:
        raise ValueError(f"{len(lengths)} sequences do not fill batches of {size}")
    return [Lengths.equal(lengths[start : start + size]) for start in range(0, len(lengths), size)]


def padded_share(histogram: Mapping[int, int], length: int) -> float:
    """Share of the tokens that are padding if all sequences are padded to ``length``.

    Raises ValueError for one that is shorter than a sequence.
    """
    if max(histogram) > length:
        raise ValueError(f"length={length} is below the longest sequence's {max(histogram)}")
    tokens = sum(n * count for n, count in histogram.items())
    return 1 - tokens / (length * sum(histogram.values()))
