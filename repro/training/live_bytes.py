"""Live and peak tensor bytes of a region, on any device, without the allocator's help.

A dispatch mode sees every operation's results; each new storage counts from then until it is freed.
Temporaries inside one operation do not reach the dispatcher and are not seen; nor is rounding by an
allocator. Unpinned buffers of ``repro.training.link.Pool`` come from elsewhere and do not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.arguments import items


class LiveBytes(TorchDispatchMode):
    """Context that counts tensor storages made inside it.

    ``live_bytes`` now, ``peak_bytes`` the maximum. Pass tensors in ``known`` that exist already and
    shall not count (parameters, inputs): dense ones, which have one storage. Gradients
    made inside count until they are freed.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        given: list[Tensor] = items("known", known, Tensor)
        for i, tensor in enumerate(given):
            if tensor.is_nested or tensor.layout != torch.strided:
                kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
                raise TypeError(f"known[{i}] is {kind}; dense (strided) tensors are followed")
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: dict[int, int] = {}
        for tensor in given:
            self._follow(tensor, count=False)

    def reset_peak(self) -> None:
        """The peak from here on starts at what is live now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = {_key(leaf) for leaf in _pytree.tree_leaves((args, kwargs)) if _plain(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves(out):
            if _plain(leaf) and _key(leaf) not in given:  # not a view or an in-place result
                self._follow(leaf, count=True)
        return out

    def _follow(self, tensor: Tensor, *, count: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        nbytes = storage.nbytes() if count else 0
        self._seen[key] = nbytes
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._seen.pop(key)


def _plain(leaf: object) -> TypeGuard[Tensor]:
    if not isinstance(leaf, Tensor):
        return False
    return type(leaf) in (Tensor, torch.nn.Parameter) and leaf.device.type != "meta"


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
