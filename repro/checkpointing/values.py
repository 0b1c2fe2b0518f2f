"""What passes between two stages: tensors inside any nest of tuples, lists, dicts and the like."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

State = tuple[Tensor, ...]
StageFn = Callable[..., Any]

#: Leaves that are passed on as they are.
CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Values:
    """A value taken apart: its tensors in order, and what puts them together again.

    spec: None of a tensor, `tuple` of a tuple of tensors, which need no pytree; else a pytree's
    """

    tensors: State
    leaves: tuple[Any, ...]  # None where a tensor belongs
    places: tuple[int, ...]  # of the tensors among the leaves
    spec: Any

    @classmethod
    def of(cls, value: Any, where: str) -> Values:
        """TypeError names `where` the value comes from and what in it is no dense tensor."""
        if isinstance(value, Tensor):
            _require_dense(value, where)
            return cls((value,), (None,), (0,), None)
        if type(value) is tuple and value and all(isinstance(item, Tensor) for item in value):
            for item in value:
                _require_dense(item, where)
            return cls.of_tensors(value)
        leaves, spec = _pytree.tree_flatten(value)
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise TypeError(
                    f"{where} returned {type(leaf).__name__}, need a tensor or a tuple, list or dict of tensors"
                )
            if isinstance(leaf, Tensor):
                _require_dense(leaf, where)
        if not places:
            raise TypeError(f"{where} returned {type(value).__name__} without a tensor in it")
        rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(tuple(leaves[i] for i in places), rest, places, spec)

    @classmethod
    def of_tensors(cls, tensors: State) -> Values:
        """A tuple of tensors, which may be empty."""
        return cls(tensors, (None,) * len(tensors), tuple(range(len(tensors))), tuple)

    def rebuild(self, tensors: Iterable[Tensor]) -> Any:
        """The value with other tensors in the places of these."""
        if self.spec is tuple:
            return tuple(tensors)
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return leaves[0] if self.spec is None else _pytree.tree_unflatten(leaves, self.spec)


def _require_dense(tensor: Tensor, where: str) -> None:
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise TypeError(
            f"{where} returned a tensor that is {kind}; between stages only dense (strided) ones "
            "can be kept: join this stage with the next"
        )


def call(stage: StageFn, value: Any, unpack: bool) -> Any:
    """Run a stage on what the stage before returned: a tuple becomes its arguments if `unpack`,
    else the stage takes it as one argument, as in nn.Sequential."""
    return stage(*value) if unpack and isinstance(value, tuple) else stage(value)


def stage_name(stage: StageFn) -> str:
    """What messages call a stage: its label, a function's name, or its class."""
    return getattr(stage, "label", None) or getattr(stage, "__name__", None) or type(stage).__name__


def version(tensor: Tensor) -> int | None:
    """How often a tensor was written to in place; None where nobody counts."""
    return None if tensor.is_inference() else tensor._version


class Held:
    """An activation that waits until a stage runs on it again: detached, with its versions."""

    def __init__(self, value: Values) -> None:
        self.tensors = tuple(tensor.detach() for tensor in value.tensors)
        self._flags = tuple(tensor.requires_grad for tensor in value.tensors)
        self._versions = tuple(version(tensor) for tensor in self.tensors)
        self._shape = Values((), value.leaves, value.places, value.spec)

    def again(self, name: str) -> Any:
        """The value with fresh leaves; RuntimeError where somebody has written to it meanwhile."""
        for tensor, before in zip(self.tensors, self._versions, strict=True):
            if version(tensor) != before:
                raise RuntimeError(
                    f"{name}, a tensor of shape {tuple(tensor.shape)}, was changed by an in-place "
                    f"operation after the forward pass had read it (version {before} then, "
                    f"{version(tensor)} now), and a stage has to run on it again: change a copy, "
                    "or call backward first"
                )
        fresh = (
            tensor.detach().requires_grad_() if flag else tensor.detach()
            for tensor, flag in zip(self.tensors, self._flags, strict=True)
        )
        return self._shape.rebuild(fresh)


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind tensors."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def single(value: Any, unpack: bool) -> Any:
    return value[0] if unpack and type(value) is tuple and len(value) == 1 else value


def plain(stages: Iterable[StageFn], inputs: tuple[Any, ...], unpack: bool = True) -> Any:
    """The stages one after the other, as the model runs them."""
    value: Any = inputs if unpack or len(inputs) != 1 else inputs[0]
    for stage in stages:
        value = call(stage, value, unpack)
    return single(value, unpack)
