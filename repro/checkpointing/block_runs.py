"""Blocks of a model that run again in the backward, with the promise of a planned model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from .arguments import Arguments
from .block_step import Recorder
from .repeat import Around, Repeat
from .replay import Surroundings, cuda_devices
from .values import Held, State, Values


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules with another forward, in their own places."""
    own = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, before in own.items():
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before


class InnerGradientError(RuntimeError):
    """A block calls autograd in its own forward, and that was not known."""

    def __init__(self, block: str, message: str) -> None:
        super().__init__(message)
        self.block = block


def again_in_backward(
    block: nn.Module, name: str, *, inner: bool, check: bool, recorder: Recorder | None = None
) -> Callable[..., Any]:
    """A forward for `block` that gives up what it saves.  inner: it calls autograd itself.
    check: compare what the second run gives with what the first one gave.  recorder: of both."""
    own = block.forward

    @torch.compiler.disable
    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        run = BlockRun(block, name, own, Arguments(args, kwargs), check)
        if recorder is None:
            return run.first(args, kwargs, inner=inner)
        with recorder.first(name, run.given) as call:
            run.recorded = partial(recorder.again, call)
            run.around.seen = partial(recorder.saves, call)
            return run.first(args, kwargs, inner=inner, hold=recorder.hold)

    return forward


class BlockRun:
    """One call of a block: its first run, and the second when the backward asks for it."""

    def __init__(self, block: nn.Module, name: str, own: Callable[..., Any], call: Arguments, check: bool) -> None:
        self._block, self._own, self._call = block, own, call
        self._key, self._name = name, f"block {name} ({type(block).__name__})"
        self._held: Held | None = Held(Values.of_tensors(call.tensors))
        weights = list(block.parameters())
        kinds = {"cpu", *(tensor.device.type for tensor in (*call.tensors, *weights))}
        devices = cuda_devices(call.tensors, weights)
        self.around = Around(Surroundings(tuple(sorted(kinds))), devices, True, check)
        self.recorded: Callable[[], AbstractContextManager[None]] = nullcontext  # around a second run
        self._repeat: Repeat
        self._lock = threading.RLock()  # several devices' threads may go backward

    @property
    def given(self) -> State:
        return self._call.tensors

    def first(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, inner: bool, hold: bool = True) -> Any:
        """hold: what a second run needs."""
        given, self._call.tensors = self._call.tensors, ()
        self._repeat = Repeat(self._block, self._name, self.around, hold=inner)
        held, self._held = self._held, None  # nothing is provided while it runs
        with self._repeat.first(self, 1, given) as ran:
            result = self._own(*args, **kwargs)
        self._held = held if hold else None
        del held
        if inner:
            self._repeat.empty()
        ran(_tensors(result))
        return result

    def label(self, stage: int) -> str:
        return self._name

    def provide(self, stage: int) -> None:
        with self._lock:
            held, self._held = self._held, None
            if held is None:
                return
            with self.recorded():
                given = held.again(f"an argument of {self._name}")
                with self._repeat.again(given, fill=True) as ran:
                    result = self._own(*self._call.args(given), **self._call.kwargs(given))
                ran(_tensors(result))
                del result
            if torch._C._current_graph_task_id() == -1:
                self.around.settle()
            else:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self.around.settle)

    def refuse(self, stage: int) -> None:
        raise InnerGradientError(
            self._key,
            f"{self._name} calls autograd inside its own forward, which it did not do when it was "
            "profiled, or saved nothing when it ran again: plan it in the state in which it trains",
        )


def _tensors(result: Any) -> State:
    return tuple(leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, Tensor))
