"""What a stage remembers from one call to the next, so that a repeated run starts as the first did.

What is looked at stands in stage_places.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .stage_places import LEAVE, MODULES_OWN, Places, alike, alike_dicts, has_graph, is_sharded
from .values import storage_bytes, version

#: Larger tensors are watched but not copied before each run: masks, tables, weights.
COPIED_BYTES = 2**20
_MISSING = object()


class Memory:
    """The state of one stage, or of several in a list, at one moment.

    places: an earlier look at the same stage, which serves while it is still right.
    """

    def __init__(
        self,
        stage: object,
        *,
        copied_bytes: float = COPIED_BYTES,
        places: Places | None = None,
    ) -> None:
        self._limit = copied_bytes
        self._places = places if places is not None and places.unchanged() else Places(stage)
        self._arrays = [(a, a.copy()) for a in self._places.arrays if a.nbytes <= copied_bytes]
        self._generators = [(write, read, read()) for write, read in self._places.generators]
        #: tensor, its name, version and address then, its values then (None: too large to copy)
        self._tensors: list[tuple[Tensor, str, int | None, int, Tensor | None]] = [
            (tensor, name, version(tensor), tensor.data_ptr(), self._copy_of(tensor))
            for tensor, name in self._places.tensors
            if tensor.grad_fn is None
        ]

    def _copy_of(self, tensor: Tensor) -> Tensor | None:
        trained = tensor.requires_grad and isinstance(tensor, nn.Parameter)
        return None if trained or tensor.nbytes > self._limit else tensor.detach().clone()

    # -- after the first run ----------------------------------------------------------------------

    def settle(self, stage: str, *, strict: bool = True) -> int:
        """Keep copies only of what the run has changed; returns their bytes.

        If `strict`, RuntimeError where it has changed what cannot be put back: a trained parameter,
        or a tensor too large to have been copied.
        """
        kept: list[tuple[Tensor, str, int | None, int, Tensor | None]] = []
        freed: list[Tensor] = []
        for tensor, name, before, address, copy in self._tensors:
            moved = version(tensor) != before or tensor.data_ptr() != address
            if copy is None:
                if moved and strict:
                    raise RuntimeError(
                        f"{stage} writes to {name or 'a tensor'} of {tensor.nbytes:,} bytes while "
                        "it runs, which cannot be undone for a second run: write to a copy, or "
                        "choose a plan that runs this stage once (strategy='store-all')"
                    )
                kept.append((tensor, name, before, address, None))
            elif moved or (copy.device.type == "cpu" and not torch.equal(copy, tensor)):
                kept.append((tensor, name, before, address, copy))
                freed.append(copy)
        self._tensors = kept
        if self._places.unchanged():
            return storage_bytes(freed)
        self._places.whole = False  # kept for a next step they would hold what was replaced
        replaced = [
            value
            for place, items, _ in self._places.dicts
            for key, value in items.items()
            if isinstance(value, Tensor)
            and not isinstance(value, nn.Parameter)
            and place.get(key) is not value
        ]
        return storage_bytes([*freed, *replaced])

    def reusable(self) -> Places | None:
        """After `settle`: places that the next step's look at this stage may begin with."""
        return self._places if self._places.whole else None

    # -- before and after a repeated run ----------------------------------------------------------

    @contextmanager
    def in_force(self, stage: str) -> Iterator[None]:
        """Put everything back as it was then; afterwards as it was just before.

        RuntimeError where a parameter, or a tensor without a copy, has been written to since."""
        for tensor, name, before, _, copy in self._tensors:
            if copy is None and version(tensor) != before:
                raise RuntimeError(
                    f"{name or 'a tensor'} of {stage} was changed by an in-place operation "
                    f"after the forward pass (version {before} then, {version(tensor)} now), "
                    "and the stage has to run with it again: call backward first"
                )
        with ExitStack() as undo, self._versions():
            self._restore(undo)
            yield
            undo.close()

    def put_back(self) -> None:
        """Put everything back as it was, for good."""
        with self._versions():
            self._restore(ExitStack())

    def _versions(self) -> AbstractContextManager[Any]:
        """Writing to tensors in here is no change that a graph should complain about."""
        written = tuple(
            t for t, *_, copy in self._tensors if copy is not None and not t.is_inference()
        )
        return (
            torch.autograd._unsafe_preserve_version_counter(written) if written else nullcontext()
        )

    def _restore(self, undo: ExitStack) -> None:
        for place, items, own in self._places.dicts:
            if not alike_dicts(place, items):
                self._exchange(undo, place, items, own)
        for cell, then in self._places.cells:
            if cell.cell_contents is not then:
                undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
                cell.cell_contents = then
        for container, then in self._places.contents:
            if not alike(container, then):
                undo.callback(_refill, container, container.copy())
                _refill(container, then)
        for array, then in self._arrays:
            if not np.array_equal(array, then):
                undo.callback(np.copyto, array, array.copy())
                np.copyto(array, then)
        for write, read, then in self._generators:
            undo.callback(write, read())
            write(then)
        written = [(tensor, copy) for tensor, *_, copy in self._tensors if copy is not None]
        if written:
            tensors = [tensor.detach() for tensor, _ in written]
            undo.callback(_write, tensors, [tensor.clone() for tensor in tensors])
            _write(tensors, [copy for _, copy in written])

    @staticmethod
    def _exchange(undo: ExitStack, place: dict, items: dict, own: bool) -> None:
        for key, then in items.items():
            now = place.get(key, _MISSING)
            if now is then or then is LEAVE or (own and key in MODULES_OWN):
                continue
            if is_sharded(now) or is_sharded(then):
                continue  # the sharding of weights is somebody else's business
            undo.callback(_assign, place, key, now)
            place[key] = then
        for key in [k for k in place if k not in items and not (own and k in MODULES_OWN)]:
            if not has_graph(place[key]):
                undo.callback(_assign, place, key, place[key])
                del place[key]


def _assign(place: dict, key: Any, value: Any) -> None:
    if value is _MISSING:
        place.pop(key, None)
    else:
        place[key] = value


def _write(tensors: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(tensors, values)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content) if isinstance(container, set) else container.extend(content)
