"""What the flash kernels do to scores before the softmax: arguments of ``scores.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.bias_gradient import shared
from kernels.launch import Argument, Array

FP32_TINY = 2.0**-126
"""The least positive number that fp32 holds without loss."""
LARGEST_RATE = 2.0**125
"""Of scale / softcap: the kernels multiply it by 2 log2(e)."""


def capped(softcap: float) -> float:
    """A cap whose value and reciprocal fp32 can hold; ValueError names the limits otherwise."""
    if not FP32_TINY <= softcap <= 1 / FP32_TINY:  # also true for NaN
        raise ValueError(f"softcap={softcap} is outside {FP32_TINY:.4g}…{1 / FP32_TINY:.4g}")
    return float(softcap)


@dataclass(frozen=True)
class ScoreChanges:
    """Between the product and the softmax, in this order (query i, key j):

        s = scale · q·k
        s ← softcap · tanh(s / softcap)
        s ← s - alibi_slopes[b, h] · abs(i + Nk - Nq - j)
        s ← s + bias[b, h, i, j]

    Args:
        softcap: above 0; None leaves it out.
        alibi_slopes: (B, H, 1) fp32; stride 0 shares them among items, or packed sequences.
        bias: (1 or B, 1 or H, Nq, Nk) in the io type; -inf takes a pair out.
    """

    softcap: float | None = None
    alibi_slopes: Array | None = None
    bias: Array | None = None

    def check(self, q: Array, k: Array, items: int | None = None) -> None:
        """ValueError or TypeError for what the kernels would misread, naming both values.

        items: that have slopes of their own; by default B.
        """
        if self.softcap is not None:
            capped(self.softcap)
        slopes = self.alibi_slopes
        if slopes is not None:
            if slopes.dtype != "fp32":
                raise TypeError(f"alibi_slopes has dtype {slopes.dtype}, not fp32")
            expected = (q.shape[0] if items is None else items, q.shape[1], 1)
            if slopes.shape != expected:
                raise ValueError(f"alibi_slopes has shape {slopes.shape}, not (B, H, 1) = {expected}")
        if self.bias is not None:
            check_bias("bias", self.bias, q, k)

    @property
    def features(self) -> frozenset[str]:
        """Names of those that there are, as in ``analysis.features``."""
        named = {"softcap": self.softcap, "alibi": self.alibi_slopes, "bias": self.bias}
        return frozenset(name for name, value in named.items() if value is not None)

    def arguments(self, scale: float) -> list[Argument]:
        """Of each kernel that makes scores, after ``scale``."""
        args: list[Argument] = []
        if self.softcap is not None:
            # Where fp32 holds no more every product is beyond the cap; infinity would make 0 a NaN.
            rate = min(max(scale / self.softcap, -LARGEST_RATE), LARGEST_RATE)
            args += [np.float32(self.softcap), np.float32(rate)]
        if self.alibi_slopes is not None:
            args.append(self.alibi_slopes.with_access("r", "alibi_slopes"))
        if self.bias is not None:
            args.append(shared(self.bias).with_access("r", "bias"))
        return args


def check_bias(name: str, bias: Array, q: Array, k: Array) -> None:
    """ValueError or TypeError for a bias, or its gradient, that does not fit q and k."""
    if bias.dtype != q.dtype:
        raise TypeError(f"{name} has dtype {bias.dtype}, q {q.dtype}")
    batch, heads, rows = q.shape[:3]
    fits = len(bias.shape) == 4 and bias.shape[2:] == (rows, k.shape[2])
    if not fits or bias.shape[0] not in (1, batch) or bias.shape[1] not in (1, heads):
        wanted = f"(1 or {batch}, 1 or {heads}, {rows}, {k.shape[2]})"
        raise ValueError(f"{name} has shape {bias.shape}, not (1 or B, 1 or H, Nq, Nk) = {wanted}")
