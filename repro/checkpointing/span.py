"""The stretch of a run that is a stage's own.

Of a model that its own forward calls, what comes before the blocks runs first whenever what comes
after them shall be measured, and the model has to be left where its first block begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree

from .passed import Around
from .values import StageFn, State

T = TypeVar("T")


class Span(Generic[T]):
    """`of` is what the context gave that was open during the stretch."""

    of: T

    def __init__(self, context: Callable[[], AbstractContextManager[T]]) -> None:
        self._context, self._stack = context, ExitStack()

    def begin(self) -> None:
        self.of = self._stack.enter_context(self._context())

    def close(self) -> None:
        self._stack.close()


class Part(nn.Module):
    """A stretch of a model as a stage: tensors in, tensors out.

    late: `run` calls `begins` where its own work begins.  Where it ends before `run` does, it calls
    `ends`.  around: what has come from before the stretch, while it is measured.
    """

    def __init__(self, label: str, owner: nn.Module, run: Callable[..., Any], *, late: bool = False) -> None:
        super().__init__()
        self.label, self.owner, self.late = label, owner, late
        self.run: Any = run
        self.begins: Callable[[], None] = _nothing
        self.ends: Callable[[], None] = _nothing
        self.around: Around | None = None

    def forward(self, *tensors: Tensor) -> State:
        leaves = _pytree.tree_leaves(self.run(*tensors))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


def _nothing() -> None:
    pass


@contextmanager
def span(
    stage: StageFn, context: Callable[[], AbstractContextManager[T]], *, until_left: bool = False
) -> Iterator[Span[T]]:
    """A context around a run of a stage, or around its own stretch of it.  until_left: also around
    what follows the run."""
    found = Span(context)
    if not isinstance(stage, Part):
        found.begin()
    else:
        stage.begins = found.begin if stage.late else _nothing
        stage.ends = _nothing if until_left else found.close
        if not stage.late:
            found.begin()
    try:
        yield found
    finally:
        found.close()
        if isinstance(stage, Part):
            stage.begins = stage.ends = _nothing
