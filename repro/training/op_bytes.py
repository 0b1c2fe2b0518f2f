"""Bytes that torch's eager operations read and write, counted operation by operation.

Each dispatched operation counts its distinct input and output tensors once, views as what they
touch. What a kernel does inside (passes over its input, caches) is not seen.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class OperationBytes(TorchDispatchMode):
    """Context that counts (read, written) bytes by operation name."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, int] = defaultdict(int)
        self.written: dict[str, int] = defaultdict(int)

    @property
    def total_bytes(self) -> int:
        """All bytes read and written."""
        return sum(self.read.values()) + sum(self.written.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = _distinct((args, kwargs))
        outputs = _distinct(out)
        if all(key in inputs for key in outputs) and not func._schema.is_mutable:
            return out  # a view: nothing moves
        self.read[name] += sum(inputs.values())
        self.written[name] += sum(outputs.values())
        return out


def _distinct(tree: Any) -> dict[int, int]:
    """Storage -> bytes touched, for the tensors of a tree."""
    found: dict[int, int] = {}
    for leaf in _pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            key = leaf.untyped_storage()._cdata
            found[key] = max(found.get(key, 0), _touched(leaf))
    return found


def _touched(tensor: Tensor) -> int:
    """Bytes of distinct elements: a broadcast dimension counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count
