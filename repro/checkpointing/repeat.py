"""One stage of one step: its first run, and the runs after it, which must give the same.

Executor and block plans (executor.py, block_runs.py) run stages by it.  A repeated run starts from
the same random numbers, autocast settings, buffers and attributes (replay.py, state.py); its
results, and what it saves for the backward, are compared with the first run's (fingerprint.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .fingerprint import Prints, difference
from .replay import RandomState, Surroundings
from .saved import INNER_HOOKS, Fill, Owner, Pack, Saved, present
from .state import ModuleState


@dataclass
class Around:
    """What surrounds the runs of one step: settings, devices, and comparisons that wait.

    preserve, check: as the user asked for (preserve_rng_state, check_recompute)
    generators: the random state after the run before, between which and the next nobody draws
    seen: is given every tensor that a first run saves, and what the graph has for it
    """

    surroundings: Surroundings
    devices: tuple[int, ...]
    preserve: bool
    check: bool
    generators: RandomState | None = None
    seen: Callable[[Tensor, Saved], None] | None = None

    def __post_init__(self) -> None:
        self._waiting: list[tuple[str, Tensor]] = []  # outcomes that a device knows
        self._task = -1

    def compare(self, what: str, first: Prints, second: Prints) -> None:
        differs, equal = difference(first, second)
        if differs:
            raise RuntimeError(_different(what, f" ({differs})"))
        if equal is not None:
            self._waiting.append((what, equal))

    def settle(self) -> None:
        """RuntimeError where a device has found a difference."""
        waiting, self._waiting = self._waiting, []
        if waiting and not bool(torch.stack([w.to(waiting[0][1].device) for _, w in waiting]).all()):
            raise RuntimeError(_different(next(what for what, equal in waiting if not equal), ""))


class Repeat:
    """Of a stage that may run again: places for what it saved, and what a second run needs.

    hold: the stage calls autograd in its own forward
    """

    def __init__(self, stage: object, name: str, around: Around, *, hold: bool = False) -> None:
        self.stage, self.name, self.hold, self._around = stage, name, hold, around
        self.places: list[weakref.ref[Saved]] = []
        self._saved: Prints | None = None
        self._results: Prints | None = None
        self._state: ModuleState | None = None
        self._random: RandomState | None = None

    @contextmanager
    def first(
        self, run: Owner, number: int, inputs: Sequence[Tensor], *, keep: bool = False
    ) -> Iterator[Callable[[Sequence[Tensor]], None]]:
        """Around the first run, which is stage `number` of `run`.  keep: what it saves stays.
        Afterwards give its results to what this returns."""
        around = self._around
        self._state = ModuleState(self.stage)
        self._saved = Prints(inputs, self.stage) if around.check else None
        pack = Pack(run, number, self.places, hold=keep or self.hold, prints=self._saved, seen=around.seen)
        before = (around.generators or RandomState.now(around.devices)) if around.preserve else None
        # Not a method of the run: the graph would hold it, and it knows the graph's places.
        with INNER_HOOKS.without_graph(), saved_tensors_hooks(pack, Saved.unpack):
            yield self._ran
        if before is not None:
            around.generators = RandomState.now(around.devices, before)
            self._random = before if around.generators != before else None
        self._state.settle(self.name)

    def _ran(self, results: Sequence[Tensor]) -> None:
        if self._saved is not None:
            self._results = self._saved.results(results)

    @contextmanager
    def again(self, inputs: Sequence[Tensor], *, fill: bool) -> Iterator[Callable[[Sequence[Tensor]], None]]:
        """Around a repeated run.  fill: what it saves goes to the places that the first run left.
        Afterwards give its results to what this returns: RuntimeError where they differ."""
        around, saved = self._around, None
        if self._results is not None:
            saved = Prints(inputs, self.stage)
        pack: Any = lambda tensor: tensor.detach() if self.hold else None  # noqa: E731
        if fill:
            pack = Fill(self.places, hold=self.hold, prints=saved)

        def ran(results: Sequence[Tensor]) -> None:
            if fill:
                pack.finish(self.name)
            if saved is None:
                return
            assert self._saved is not None
            assert self._results is not None
            found = saved.results(results)
            around.compare(f"{self.name} gave another result", self._results, found)
            if fill:
                around.compare(f"{self.name} saved another tensor", self._saved, saved)

        with ExitStack() as stack:
            stack.enter_context(around.surroundings.again())
            if self._random is not None:
                stack.callback(RandomState.now(around.devices).restore)
                self._random.restore()
            assert self._state is not None
            stack.enter_context(self._state.in_force(self.name))
            stack.enter_context(INNER_HOOKS.without_graph())
            stack.enter_context(saved_tensors_hooks(pack, lambda kept: present(kept, self.name)))
            yield ran

    def empty(self) -> None:
        """Give up what it saved."""
        for ref in self.places:
            if (saved := ref()) is not None:
                saved.tensor = None


def _different(what: str, how: str) -> str:
    return (
        f"{what} when it ran again{how}, so gradients would be wrong: it depends on something that "
        "changes between two runs and is put back by nobody (a global, an iterator, a private "
        "generator, the content of a list, memory shared with NumPy, ...), or on an operation that "
        "is not deterministic. Keep such state in buffers or attributes of the stage's modules, or "
        "plan with check_recompute=False if the difference does not matter"
    )
