"""Tensors that go around all blocks, from what comes before them to what comes after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree


@dataclass
class Around:
    """What a run of the stretch after the blocks has from before them.

    held: what a step's graph would keep alive.  gradients: of the tensors that went around, each
    as autograd made it, views of larger storages included.
    """

    held: list[Any] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def clear(self) -> None:
        self.held.clear()
        self.gradients.clear()


def newest_node() -> int:
    """The number of a node of the autograd graph that is made now; later ones are larger."""
    node: Any = torch.ones((), requires_grad=True).mul(1).grad_fn
    return int(node._sequence_nr())


class _Passed(torch.autograd.Function):
    """A tensor whose gradient goes no further.  start: any leaf; the graph holds it, so it is not
    the tensor."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, tensor: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        ctx.keep = keep
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.keep(gradients[0])
        return None, None, None


class Passing(TorchFunctionMode):
    """From here on, what was made earlier with a graph is used without it: its gradient is made and
    held, as a step holds it until the backward gets there, and the graph is not entered."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self._around, self._start = around, newest_node()
        self._passed: dict[int, Tensor] = {}

    def _instead(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.grad_fn is None:
            return leaf
        node: Any = leaf.grad_fn
        if node._sequence_nr() >= self._start:
            return leaf
        if id(leaf) not in self._passed:
            self._around.held.append(leaf)
            with torch.enable_grad():
                start = torch.empty((), device=leaf.device, requires_grad=True)
                self._passed[id(leaf)] = _Passed.apply(start, leaf.detach(), self._around.gradients.append)
        return self._passed[id(leaf)]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        args, kwargs = _pytree.tree_map(self._instead, (args, kwargs or {}))
        return func(*args, **kwargs)
