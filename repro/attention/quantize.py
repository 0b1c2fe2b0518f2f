"""e4m3 numbers and their scales, of keys and values: a scale a head, or a block of its keys."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.arguments import whole
from analysis.shapes import scale_blocks

__all__ = ["E4M3_MAX", "quantize_e4m3"]

E4M3_MAX = 448.0


def quantize_e4m3(
    cache: Tensor, heads: int = 1, *, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """``cache`` ≈ numbers · scale, the largest number under each scale at 448.

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
        ValueError: a dimension that is not there, or a number that is not finite.
    """
    heads = whole("heads", heads, least=0, most=cache.dim() - 1)
    if block is None:
        others = [d for d in range(cache.dim()) if d != heads]
        scale = _scale_of(cache.float().abs().amax(dim=others))
        wide = scale.view([-1 if d == heads else 1 for d in range(cache.dim())])
    else:
        if cache.dim() != 4 or heads not in (1, 2):
            raise ValueError(
                f"block={block} of a cache {tuple(cache.shape)} with heads={heads}: blocks are of "
                "(B, Hkv, N, D) or (pages, page_size, Hkv, D)"
            )
        keys = 3 - heads
        parts = cache.split(block, keys) if scale_blocks(cache.shape[keys], block) else ()
        largest = [part.float().abs().amax(dim=(keys, 3)) for part in parts]
        scale = _scale_of(torch.stack(largest, keys))
        wide = scale.repeat_interleave(block, keys)
        wide = wide.narrow(keys, 0, cache.shape[keys])[..., None]
    # A quotient may round to just above the limit, which the conversion would make NaN.
    numbers = (cache.float() / wide).clamp(-E4M3_MAX, E4M3_MAX)
    return numbers.to(torch.float8_e4m3fn), scale


def _scale_of(largest: Tensor) -> Tensor:
    if not bool(torch.isfinite(largest).all()):
        raise ValueError(f"cache has a number that is not finite: the largest are {largest}")
    return torch.where(largest > 0, largest / E4M3_MAX, 1.0)
