"""A number for a stage's result, to see whether a repeated run gave the same bits.

Two integers a tensor: the sum of its bits taken as whole numbers, which no summation order changes,
and a sum over 256 elements weighted by their position, which moves when elements change places.
One pass over the tensor, no copy of a contiguous one.  On a GPU both stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SAMPLES = 256
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Shape, type and the two sums of each tensor.
Fingerprint = list[tuple[torch.Size, torch.dtype, Tensor | tuple[int, ...]]]


@torch.no_grad()
def fingerprint(tensors: Sequence[Tensor]) -> Fingerprint:
    return [(tensor.shape, tensor.dtype, _sums(tensor)) for tensor in tensors]


def _sums(tensor: Tensor) -> Tensor | tuple[int, ...]:
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return ()
    bits = tensor.detach()
    if bits.is_complex():
        bits = torch.view_as_real(bits.resolve_conj())
    if bits.dtype is torch.bool:
        bits = bits.view(torch.uint8)
    bits = bits.resolve_neg()
    strides = bits.stride()
    bits = bits.permute(sorted(range(bits.dim()), key=lambda d: -strides[d]))
    size = bits.element_size()
    whole = bits.view(_WHOLE[size])
    if not whole.is_contiguous():  # gaps or repeats in memory: slower, but no copy either
        longest = max(range(whole.dim()), key=whole.size)
        few = whole.sum([d for d in range(whole.dim()) if d != longest], dtype=torch.int64)
    else:
        whole = whole.view(-1)
        few = whole[:: max(1, whole.numel() // SAMPLES)].to(torch.int64)
        if size < 8 and whole.numel() * size % 8 == 0 and whole.storage_offset() * size % 8 == 0:
            whole = whole.view(torch.int64)  # as quick as memory allows
    weighted = (few * torch.arange(1, few.numel() + 1, device=few.device)).sum()
    total = whole.sum()
    if total.device.type == "cpu":
        return int(total), int(weighted)
    return torch.stack([total, weighted])


def same(first: Fingerprint, second: Fingerprint) -> bool | Tensor:
    """Whether two results agree; a tensor on the device where that is known only there."""
    if len(first) != len(second):
        return False
    waiting = []
    for (shape, dtype, sums), (again, other, others) in zip(first, second, strict=True):
        if shape != again or dtype != other:
            return False
        if isinstance(sums, Tensor) and isinstance(others, Tensor):
            waiting.append((sums == others).all())
        elif isinstance(sums, Tensor) or isinstance(others, Tensor) or sums != others:
            return False
    return torch.stack([w.to(waiting[0].device) for w in waiting]).all() if waiting else True
