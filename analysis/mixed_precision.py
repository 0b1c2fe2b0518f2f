"""Bytes a transformer layer saves in fp32, in 16 bits, and under autocast.

Autocast keeps parameters, residual stream and norms in fp32 and runs products in 16 bits. It saves
half of most activations, but also a 16-bit copy of every weight it multiplies by, which lives until
the backward; small batches can save more bytes under autocast than in fp32.
"""

from __future__ import annotations

from fractions import Fraction

from analysis.parallel_activations import LayerShape, saved_by_tensor

POLICIES = ("fp32", "16-bit", "autocast")

#: Saved by the norms, which autocast leaves in fp32.
_KEPT_FP32 = ("norm1_input", "norm2_input", "norm_statistics")


def saved_under(shape: LayerShape, policy: str, *, softmax_itemsize: int = 2) -> dict[str, Fraction]:
    """Saved bytes of one layer by tensor, on one rank, dropout masks of one byte.

    ``softmax_itemsize`` is the type autocast gives the softmax: 2 on CPUs, 4 on GPUs. The dropout
    output is cast for the product that saves it, so it has 2 bytes on both.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {POLICIES}, got {policy!r}")
    if policy != "autocast":
        itemsize = 4 if policy == "fp32" else 2
        return saved_by_tensor(shape, itemsize=itemsize, statistics_itemsize=itemsize)
    saved = saved_by_tensor(shape, itemsize=2, statistics_itemsize=2)
    saved |= {name: 2 * saved[name] for name in _KEPT_FP32}
    saved["softmax_output"] *= Fraction(softmax_itemsize, 2)
    saved["weight_copies"] = Fraction(2 * 12 * shape.hidden**2)
    return saved


def autocast_break_even_tokens(shape: LayerShape) -> int:
    """Smallest number of tokens (seqlen x batch, at this seqlen) at which autocast saves bytes."""
    tokens = shape.seqlen
    while True:
        probe = LayerShape(shape.seqlen, tokens // shape.seqlen, shape.hidden, shape.heads)
        if sum(saved_under(probe, "autocast").values()) < sum(saved_under(probe, "fp32").values()):
            return tokens
        tokens += shape.seqlen
