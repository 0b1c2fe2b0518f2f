"""What the modules of a stage hold directly, buffers and attributes, at one moment.

A repeated run finds it as the first run did.  What lies deeper (in containers, closures, private
generators, other objects) is not put back: a run that depends on it differs from the first and is
refused by comparison (fingerprint.py, outside.py).
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from .replay import RandomState
from .stage_parts import StandIns, modules_of
from .values import version

#: Larger tensors are watched but not copied before each run: masks, tables, weights.
COPIED_BYTES = 2**20
#: Attributes of a module that torch itself looks after.
_MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}


class _Noted(NamedTuple):
    """A tensor and its version and memory (an alias) at one moment.  copy: its values, None where they
    are watched only.

    `tensor.data = ...` and `set_` give a tensor other memory, which may be another tensor's: its
    values are put back into the memory that it had.
    """

    tensor: Tensor
    name: str
    version: int | None
    memory: Tensor
    copy: Tensor | None

    def moved(self) -> bool:
        now, then = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (self.tensor, self.memory))
        return now != then

    def move_back(self) -> None:
        if self.moved():
            self.tensor.data = self.memory


class ModuleState:
    """Buffers and attributes of the modules of a stage (or of several in a list)."""

    def __init__(self, stage: Any, *, copied_bytes: float = COPIED_BYTES) -> None:
        self._places: list[tuple[dict, dict]] = []
        self._tensors: list[_Noted] = []
        seen: set[int] = set()
        for root in modules_of(stage):
            for prefix, module in root.named_modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                for place in (module._parameters, module._buffers, module.__dict__):
                    items = place.copy()
                    self._places.append((place, items))
                    for key, value in items.items():
                        if isinstance(value, Tensor):
                            name = f"{prefix}.{key}" if prefix else key
                            items[key] = self._noted(value, name, place, module, copied_bytes)

    def _noted(self, tensor: Tensor, name: str, place: dict, module: nn.Module, limit: float) -> object:
        """What stands for a tensor among the items; its values are copied where they may change."""
        if tensor.grad_fn is not None:
            # functional_call puts results of other operations in the place of weights.  Any other
            # is not held: that would be to hold the run that made it.
            weight = place is module._parameters
            return tensor.detach().requires_grad_() if weight else _Unheld(tensor)
        if not is_sharded(tensor) and tensor.layout is torch.strided:
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            copy = None if trained or tensor.nbytes > limit else tensor.detach().clone()
            self._tensors.append(_Noted(tensor, name, version(tensor), tensor.data, copy))
        return tensor

    # -- after the first run ----------------------------------------------------------------------

    def settle(self, stage: str, *, strict: bool = True) -> int:
        """Keep copies only of what the run has changed; returns the bytes of what is kept.

        If `strict`, RuntimeError where it has changed what cannot be put back: a trained parameter,
        or a tensor too large to have been copied.
        """
        kept: list[_Noted] = []
        freed: list[Tensor] = []
        for noted in self._tensors:
            tensor, name, before, memory, copy = noted
            moved = noted.moved()
            written = moved or version(tensor) != before
            if copy is None:
                if written and strict:
                    raise RuntimeError(
                        f"{stage} writes to {name} of {tensor.nbytes:,} bytes while it runs, which "
                        "cannot be undone for a second run: write to a copy, or choose a plan that "
                        "runs this stage once (strategy='store-all')"
                    )
                kept.append(noted)
            elif written or (copy.device.type == "cpu" and not torch.equal(copy, tensor)):
                kept.append(noted)
                freed += [copy, memory] if moved else [copy]
        self._tensors = kept
        then, now = _storages(freed), dict[int, int]()
        for place, items in self._places:
            for key, value in items.items():
                if (new := place.get(key)) is not value and not isinstance(value, nn.Parameter):
                    then |= _storages(_pytree.tree_leaves(value))
                    now |= _storages(_pytree.tree_leaves(new))
        return sum(nbytes for storage, nbytes in then.items() if storage not in now)

    # -- before and after a repeated run ----------------------------------------------------------

    @contextmanager
    def in_force(self, stage: str) -> Iterator[None]:
        """Put everything back as it was then; afterwards as it was just before.

        RuntimeError where a parameter, or a tensor without a copy, has been written to since."""
        for tensor, name, before, _, copy in self._tensors:
            if copy is None and version(tensor) != before:
                raise RuntimeError(
                    f"{name} of {stage} was changed by an in-place operation after the forward "
                    f"pass (version {before} then, {version(tensor)} now), and the stage has to "
                    "run with it again: call backward first"
                )
        now = [(place, place.copy()) for place, _ in self._places]
        copied = [noted for noted in self._tensors if noted.copy is not None]
        present = [noted._replace(memory=noted.tensor.data) for noted in copied]
        written = [noted.memory for noted in copied]
        values = [memory.clone() for memory in written]
        # Writing to tensors in here is no change that a graph should complain about.
        counted = tuple(noted.tensor for noted in copied if not noted.tensor.is_inference())
        with torch.autograd._unsafe_preserve_version_counter(counted) if counted else nullcontext():
            self.put_back()
            try:
                yield
            finally:
                for place, items in now:
                    if not _alike(place, items):
                        _exchange(place, items)
                for noted in present:
                    noted.move_back()
                _write(written, values)

    def put_back(self) -> None:
        """Put everything back as it was."""
        for place, items in self._places:
            if not _alike(place, items):
                _exchange(place, items)
        written = [(noted, noted.copy) for noted in self._tensors if noted.copy is not None]
        for noted, _ in written:
            noted.move_back()
        _write([noted.memory for noted, _ in written], [copy for _, copy in written])


def _storages(leaves: Iterable[Any]) -> dict[int, int]:
    """Bytes by storage."""
    found = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    return {storage._cdata: storage.nbytes() for storage in found}


def _alike(place: dict, then: dict) -> bool:
    """Whether the same keys have the very same values; False if only their order changed."""
    return place.keys() == then.keys() and all(map(operator.is_, place.values(), then.values()))


class _Unheld(weakref.ref):
    """A tensor with a graph among a module's attributes."""


def _exchange(place: dict, items: dict) -> None:
    for key, noted in items.items():
        then = noted() if isinstance(noted, _Unheld) else noted
        now = place.get(key)
        if now is then or key in _MODULES_OWN or is_sharded(now) or is_sharded(then):
            continue  # the sharding of weights is somebody else's business
        if isinstance(noted, _Unheld) and then is None:
            continue  # it was replaced and nobody has it any more
        place[key] = then
    for key in [key for key in place if key not in items and key not in _MODULES_OWN]:
        del place[key]


def _write(tensors: list[Tensor], values: list[Tensor]) -> None:
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(tensors, values)


@contextmanager
def left_alone(stages: Sequence[Any], devices: tuple[int, ...]) -> Iterator[RandomState]:
    """What runs inside leaves weights, gradients, buffers, attributes and random state alone."""
    random = RandomState.now(devices)
    with StandIns(stages):
        # Inside: a module that keeps a list of its parameters must get the real ones back in it.
        state = ModuleState(stages, copied_bytes=math.inf)
        try:
            yield random
        finally:
            state.put_back()
            random.restore()


def is_sharded(value: Any) -> bool:
    return type(value).__name__ == "DTensor" or hasattr(value, "_local_tensor")
