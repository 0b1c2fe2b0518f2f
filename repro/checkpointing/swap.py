"""Moving what a stage keeps to host memory and back, by storage.

A storage is emptied in place and filled again, so every tensor and saved tensor that views it stays
valid; only storages that the stage itself made are moved (never parameters, masks or other data
that happen to be saved).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Made(TorchDispatchMode):
    """Notes the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, int] = {}  # bytes by storage, while it is there

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        leaves = _pytree.tree_leaves((args, kwargs))
        given = {t.untyped_storage()._cdata for t in leaves if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given:
                    self.made[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.made.pop, storage._cdata, None)
        return out


class Watched:
    """Context around a run; `made` picks the storages that it made out of those of some tensors,
    `alive` are all that are still there, with their bytes."""

    def __init__(self) -> None:
        self._mode = _Made()

    def __enter__(self) -> Watched:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    @property
    def alive(self) -> dict[int, int]:
        return dict(self._mode.made)

    def made(self, tensors: Iterable[Tensor | None]) -> list[torch.UntypedStorage]:
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t is not None}
        return [storage for key, storage in found.items() if key in self._mode.made]


class HostCopy:
    """Storages copied to the host and emptied on the device.

    A GPU's bytes go to pinned memory.  A CPU's go to memory outside the framework's allocator,
    which plays the host there, so that what left the "device" can be measured.
    """

    def __init__(self, storages: list[torch.UntypedStorage]) -> None:
        self._copies: list[tuple[torch.UntypedStorage, int, Tensor]] = []
        for storage in storages:
            nbytes = storage.nbytes()
            if storage.device.type == "cpu":
                copy = torch.from_numpy(np.empty(nbytes, dtype=np.uint8))
            else:
                copy = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            copy.copy_(_bytes_of(storage))
            self._copies.append((storage, nbytes, copy))
            storage.resize_(0)

    def bring_back(self) -> None:
        for storage, nbytes, copy in self._copies:
            storage.resize_(nbytes)
            with torch.no_grad():
                _bytes_of(storage).copy_(copy)
        self._copies = []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
