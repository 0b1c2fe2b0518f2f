"""What autograd keeps for the backward pass: each saved storage once, parameters left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from repro.training.offload import resident_tensors


@dataclass
class SavedStorages:
    """Saved storages of a region: bytes by type, and in all."""

    by_dtype: Counter[torch.dtype] = field(default_factory=Counter)
    tensors: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all saved storages."""
        return sum(self.by_dtype.values())


@contextmanager
def count_saved(model: nn.Module | Iterable[nn.Module | Tensor]) -> Iterator[SavedStorages]:
    """Count what autograd saves inside; parameters and buffers of ``model`` do not count.

    Everything saved is kept alive until the graph is freed, so a storage's address identifies it.
    """
    found = SavedStorages()
    seen = {tensor.untyped_storage()._cdata for tensor in resident_tensors(model)}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found.tensors += 1
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found.by_dtype[tensor.dtype] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
