"""e4m3 numbers and their scales, of keys and values: a scale a head, or a block of its keys."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.arguments import whole
from analysis.shapes import scale_blocks

__all__ = ["E4M3_MAX", "quantize_e4m3"]

E4M3_MAX = 448.0


def quantize_e4m3(cache: Tensor, heads: int = 1, *, block: int | None = None) -> tuple[Tensor, Tensor]:
    """``cache`` ≈ numbers · scale, the largest number under each scale at 448 (or, where it is so
    small that fp32 has no full precision for its scale, below 5·10⁻³⁶, under a scale of 2⁻¹²⁶).

    Relative error of a number at most 2⁻⁴ (3 bits of mantissa, rounded to nearest), absolute at
    most 2⁻¹⁰ · scale where it is below 2⁻⁶ · scale. An outlier sets the scale of all numbers of its
    head, or of its block alone, and by the second term what the small ones lose.

    Args:
        cache: any floating type.
        heads: the dimension of the heads: 1 of (B, Hkv, N, D), 2 of (pages, page_size, Hkv, D).
        block: keys that share a scale, a multiple of 16, of a cache laid out as one of these two;
            None: all keys of a head, in all items and pages, share one.

    Returns:
        (numbers in float8_e4m3fn, scale in float32), for ``repro.flash_attention`` and
        ``repro.decode_attention``. scale: (Hkv,), or with ``block`` as the cache without D, its
        keys in blocks: (B, Hkv, ceil(N / block)), (pages, ceil(page_size / block), Hkv).

    Raises:
        TypeError: a cache that is not of a floating type.
        ValueError: a dimension that is not there, or a number that is not finite in float32.
    """
    if not cache.is_floating_point():
        raise TypeError(f"cache has type {cache.dtype}, not a floating type")
    heads = whole("heads", heads, least=0, most=cache.dim() - 1)
    if block is None:
        others = [d for d in range(cache.dim()) if d != heads]
        scale = _scale_of(_largest(cache, others))
        wide = scale.view([-1 if d == heads else 1 for d in range(cache.dim())])
    else:
        if cache.dim() != 4 or heads not in (1, 2):
            raise ValueError(
                f"block={block} of a cache {tuple(cache.shape)} with heads={heads}: blocks are of "
                "(B, Hkv, N, D) or (pages, page_size, Hkv, D)"
            )
        keys = 3 - heads
        count = scale_blocks(cache.shape[keys], block)
        largest = [_largest(part, [keys, 3]) for part in cache.split(block, keys)]
        scale = _scale_of(torch.stack(largest, keys).narrow(keys, 0, count))
        wide = scale.repeat_interleave(block, keys)
        wide = wide.narrow(keys, 0, cache.shape[keys])[..., None]
    # A quotient may round to just above the limit, which the conversion would make NaN.
    numbers = (cache.float() / wide).clamp(-E4M3_MAX, E4M3_MAX)
    return numbers.to(torch.float8_e4m3fn), scale


def _largest(cache: Tensor, over: list[int]) -> Tensor:
    """The largest magnitude over these dimensions; 0 where there is nothing."""
    if not cache.numel():
        return torch.zeros_like(cache, dtype=torch.float32).sum(over)
    return cache.float().abs().amax(over)


def _scale_of(largest: Tensor) -> Tensor:
    if not bool(torch.isfinite(largest).all()):
        raise ValueError(f"cache has a number that is not finite: the largest are {largest}")
    scale = (largest / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(largest > 0, scale, 1.0)
