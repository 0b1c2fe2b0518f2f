"""What stands in the graph for a tensor that a stage saved for its backward.

The graph of a planned step is the plain model's own.  Where the plan gives a stage's interior up,
each saved tensor is replaced by a `Saved`: empty, until the run fills it by running the stage
again.  A node of the graph owns its `Saved`; the run knows them by weak references only, so what
it recomputed goes as soon as the node that needed it is done, and everything goes with the graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .fingerprint import Prints


class Owner(Protocol):
    """A step, as what its graph saved sees it; stages are numbered from 1."""

    def label(self, stage: int) -> str: ...
    def provide(self, stage: int) -> None:
        """Run the stage again, where that is not done yet."""

    def refuse(self, stage: int) -> None:
        """RuntimeError for a tensor that is not there."""


_empty: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _watch(tensor: Tensor) -> Tensor | None:
    """A tensor that shares the version counter, so that it sees writes, and holds no more bytes
    than there are anyway: an empty one."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.is_inference() or tensor.is_quantized:
        return None
    if tensor.requires_grad and tensor.is_leaf:
        return tensor  # the graph has to hold it anyway, to add its gradient up
    key = (tensor.dtype, tensor.device)
    if key not in _empty:
        _empty[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    watch = tensor.detach()
    watch.data = _empty[key]
    return watch


class Saved:
    """A tensor that a node of stage `stage` saved; empty while the run does not keep it.

    leaf: a leaf itself, which is what a graph saves: it sees what `leaf.data = ...` makes of it later.
    """

    __slots__ = ("__weakref__", "dtype", "leaf", "run", "shape", "stage", "tensor", "version", "watch")

    def __init__(self, run: Owner, stage: int, given: Tensor, *, keep: bool) -> None:
        self.run, self.stage = run, stage
        self.shape, self.dtype = given.shape, given.dtype
        self.tensor = given.detach() if keep else None
        self.leaf = weakref.ref(given) if given.is_leaf else None
        self.watch = _watch(given)
        self.version = self.watch._version if self.watch is not None else 0

    def fits(self, again: Tensor) -> bool:
        return self.shape == again.shape and self.dtype == again.dtype

    def unpack(self) -> Tensor:
        """The tensor, recomputed where it must be.

        RuntimeError where somebody has written to the original since, as autograd itself raises.
        """
        if self.watch is not None and self.watch._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(self.shape)} that stage "
                f"{self.run.label(self.stage)} saved is at version "
                f"{self.watch._version}; expected version {self.version} instead"
            )
        self.run.provide(self.stage)
        if self.tensor is None:
            self.run.refuse(self.stage)
        assert self.tensor is not None
        leaf = self.leaf() if self.leaf is not None else None
        return self.tensor if leaf is None else leaf.detach()


class Pack:
    """Makes places for what a first run saves."""

    def __init__(
        self,
        run: Owner,
        stage: int,
        found: list[weakref.ref[Saved]],
        *,
        hold: bool,
        prints: Prints | None,
        seen: Callable[[Tensor, Saved], None] | None = None,
    ) -> None:
        self._run, self._stage, self._found = run, stage, found
        self._hold, self._prints, self._seen = hold, prints, seen

    def __call__(self, tensor: Tensor) -> Saved:
        saved = Saved(self._run, self._stage, tensor, keep=self._hold)
        self._found.append(weakref.ref(saved))
        if self._prints is not None:
            self._prints.add([tensor])
        if self._seen is not None:
            self._seen(tensor, saved)
        return saved


class Fill:
    """Puts what a repeated run saves into the places that the first run left.

    hold: the run's own graph, which is thrown away, needs them too
    """

    def __init__(self, places: list[weakref.ref[Saved]], *, hold: bool, prints: Prints | None) -> None:
        self._places, self._hold, self._prints = places, hold, prints
        self._number, self._misfit = 0, ""

    def __call__(self, tensor: Tensor) -> Tensor | None:
        kept = tensor.detach()
        if self._number < len(self._places):
            saved = self._places[self._number]()
            if saved is not None:
                if not saved.fits(kept):
                    self._misfit = self._misfit or (
                        f"a tensor of shape {tuple(kept.shape)} and type {kept.dtype} where it "
                        f"saved one of shape {tuple(saved.shape)} and type {saved.dtype} at first"
                    )
                saved.tensor = kept
        self._number += 1
        if self._prints is not None:
            self._prints.add([tensor])
        return kept if self._hold else None

    def finish(self, name: str) -> None:
        if self._number != len(self._places):
            raise RuntimeError(
                f"{name} saved {len(self._places)} tensors for its backward when it ran first and "
                f"{self._number} when it ran again: it does not do the same each time"
            )
        if self._misfit:
            raise RuntimeError(f"{name} saved {self._misfit}: it does not do the same each time")


def present(kept: Tensor | None, name: str) -> Tensor:
    """What a repeated run's own graph asks for; RuntimeError where the run keeps nothing."""
    if kept is None:
        raise RuntimeError(
            f"{name} calls autograd inside its own forward, which it did not do when it was "
            "profiled: plan it in the state in which it trains"
        )
    return kept


class _InnerHooks:
    """While stages run: hooks that they set themselves get tensors without a graph.

    A hook that hands a tensor back as it is would make the tensor its own keeper, by the node that
    made it, and so would every repeated run, whose graph no backward ever takes apart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()
        self._open = 0
        self._enter = saved_tensors_hooks.__enter__

    @contextmanager
    def without_graph(self) -> Iterator[None]:
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._enter = saved_tensors_hooks.__enter__
                self._exchange(lambda hooks: self._enter_inner(hooks))
        self._here.depth = getattr(self._here, "depth", 0) + 1
        try:
            yield
        finally:
            self._here.depth -= 1
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._exchange(self._enter)

    @staticmethod
    def _exchange(enter: Callable[[Any], None]) -> None:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]

    def _enter_inner(self, hooks: saved_tensors_hooks) -> None:
        own = hooks.pack_hook
        if not getattr(self._here, "depth", 0):
            return self._enter(hooks)

        def pack(tensor: Tensor) -> Any:
            return own(tensor if tensor.grad_fn is None else tensor.detach())

        hooks.pack_hook = pack
        try:
            return self._enter(hooks)
        finally:
            hooks.pack_hook = own


INNER_HOOKS = _InnerHooks()
