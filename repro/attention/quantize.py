"""fp8 caches: numbers and the scale of each head."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.arguments import whole

__all__ = ["E4M3_MAX", "quantize_e4m3"]

E4M3_MAX = 448.0


def quantize_e4m3(cache: Tensor, heads: int = 1) -> tuple[Tensor, Tensor]:
    """``cache`` ≈ numbers · scale, one scale a head, its largest number at 448.

    Relative error of a number at most 2⁻⁴ (3 bits of mantissa, rounded to nearest), absolute at
    most 2⁻¹⁰ · scale where it is below 2⁻⁶ · scale. An outlier of a head sets the scale of all its
    numbers, and by the second term what the small ones lose.

    Args:
        cache: any floating type.
        heads: the dimension of the heads: 1 of (B, Hkv, N, D), 2 of (pages, page_size, Hkv, D).

    Returns:
        (numbers in float8_e4m3fn, scale (Hkv,) in float32): for ``repro.decode_attention``.

    Raises:
        ValueError: a dimension that is not there, or a number that is not finite.
    """
    heads = whole("heads", heads, least=0, most=cache.dim() - 1)
    others = [d for d in range(cache.dim()) if d != heads]
    largest = cache.float().abs().amax(dim=others)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError(f"cache has a number that is not finite: the largest are {largest}")
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    shape = [-1 if d == heads else 1 for d in range(cache.dim())]
    # A quotient may round to just above the limit, which the conversion would make NaN.
    numbers = (cache.float() / scale.view(shape)).clamp(-E4M3_MAX, E4M3_MAX)
    return numbers.to(torch.float8_e4m3fn), scale
