"""A step of a model, all of whose blocks run again in the backward, as a timeline of bytes.

What the model's own forward does around its blocks is measured as it is: residuals, tensors that
skip blocks, several lists of blocks.  What the step takes where some blocks are kept follows from
it: such a block does not run again, what it saved is there until its backward, and its arguments are
not held for it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

NEVER = 2**62


@dataclass
class Storage:
    """freed: the stretch in which it went, in a step whose blocks all run again.  holders: calls of
    which it is an argument, and which.  savers: those that saved it, and their places for it."""

    nbytes: int
    freed: int = NEVER
    holders: list[tuple[Call, int]] = field(default_factory=list)
    savers: list[tuple[Call, Place]] = field(default_factory=list)


@dataclass
class Place:
    """Of a storage in the graph of a block.  given_up: the stretch in which the graph let go of it."""

    given_up: int = NEVER


@dataclass
class Call:
    """A run of a block in the forward.  forward, again: the stretches of its two runs, None before
    there is one.  lasting: of each argument, after how many beginnings and ends of blocks it went."""

    block: str
    forward: int = 0
    again: int = NEVER
    lasting: list[int] = field(default_factory=list)


class Recorder:
    """Cuts a step into stretches where a block begins or ends to run.

    context: what is open during a stretch; what it gave is in `stretches`, in order
    follow: what blocks save is followed, and a stretch ends as well where one goes between blocks
    hold: blocks hold their arguments, which their second run needs
    """

    def __init__(
        self, context: Callable[[], AbstractContextManager[Any]], *, follow: bool = False, hold: bool = True
    ) -> None:
        self._context, self._stack, self._follow, self.hold = context, ExitStack(), follow, hold
        self._between = False  # is no block running, and no stretch ending?
        self.stretches: list[Any] = []
        self.after: list[int] = []  # beginnings and ends of blocks, of each stretch
        self._passed = 0
        self.calls: list[Call] = []
        self.storages: list[Storage] = []
        self._known: dict[int, Storage] = {}  # those that are there, by their address

    def cut(self, between: bool = True) -> int:
        """Ends a stretch and begins the next, whose number it gives."""
        self._between = False
        self._stack.close()
        self.stretches.append(self._stack.enter_context(self._context()))
        self.after.append(self._passed)
        self._between = between
        return len(self.stretches) - 1

    def close(self) -> None:
        self._between = False
        self._stack.close()

    @contextmanager
    def first(self, block: str, given: Iterable[Tensor]) -> Iterator[Call]:
        self._passed += 1
        call = Call(block, self.cut(between=False))
        self.calls.append(call)
        self._takes(call, given)
        del given
        yield call
        self._passed += 1
        self.cut()

    @contextmanager
    def again(self, call: Call) -> Iterator[None]:
        call.again = self.cut(between=False)
        yield
        torch.clear_autocast_cache()  # as where a backward is outside of autocast
        self.cut()

    def _takes(self, call: Call, given: Iterable[Tensor]) -> None:
        for number, tensor in enumerate(given):
            call.lasting.append(NEVER)
            if self._follow:
                self._storage(tensor).holders.append((call, number))
            else:
                weakref.finalize(tensor.untyped_storage(), self._lasted, call, number)

    def saves(self, call: Call, tensor: Tensor, place: object) -> None:
        """place: what a graph has in the place of the tensor."""
        if self._follow:
            savers = self._storage(tensor).savers
            savers.append((call, Place()))
            weakref.finalize(place, self._given_up, savers[-1][1])

    def _storage(self, tensor: Tensor) -> Storage:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._known:
            self._known[address] = Storage(storage.nbytes())
            self.storages.append(self._known[address])
            weakref.finalize(storage, self._freed, address)
        return self._known[address]

    def _freed(self, address: int) -> None:
        self._known.pop(address).freed = self.cut() if self._between else len(self.stretches) - 1

    def _given_up(self, place: Place) -> None:
        place.given_up = len(self.stretches)

    def _lasted(self, call: Call, number: int) -> None:
        call.lasting[number] = self._passed


@contextmanager
def seconds(wait: Callable[[], None]) -> Iterator[list[float]]:
    """Seconds of a stretch.  wait: until a device has done what it was given."""
    wait()
    begin, found = time.perf_counter(), [0.0]
    yield found
    wait()
    found[0] = time.perf_counter() - begin


class Timeline:
    """Peaks of a step by the blocks that are kept.

    recorder: of a step.  unheld: of its forward where blocks do not hold their arguments.
    """

    def __init__(self, recorder: Recorder, unheld: Recorder) -> None:
        regions = recorder.stretches
        self._calls, self._storages = recorder.calls, recorder.storages
        self.blocks = list(dict.fromkeys(call.block for call in self._calls))
        ends = np.cumsum([region.end_bytes for region in regions])
        self._starts = ends - [region.end_bytes for region in regions]
        self._tops = np.array([region.peak_bytes for region in regions])
        # In this step's stretches, of what another one counted by beginnings and ends of blocks.
        for call, other in zip(self._calls, unheld.calls, strict=True):
            call.lasting = np.searchsorted(recorder.after, other.lasting, side="right").tolist()

    def peak(self, again: Collection[str]) -> int:
        """Of a step in which these blocks run again."""
        return int(self.levels([name for name in self.blocks if name not in again]).max())

    def levels(self, keep: Collection[str]) -> Any:
        """The peak of each stretch."""
        found = self._starts + self._tops
        kept = set(keep)
        for call in self._calls:
            if call.block in kept and call.again != NEVER:
                found[call.forward] = max(found[call.forward], self._starts[call.forward] + self._tops[call.again])
                found[call.again] = -NEVER
        more = np.zeros(len(found) + 1, dtype=np.int64)
        for storage in self._storages:
            begin, end = storage.freed, self._freed(storage, kept)
            if end > begin and storage.savers:  # that call's own peak is counted above
                begin = max(begin, storage.savers[0][0].forward + 1)
            more[min(begin, len(found))] += storage.nbytes
            more[min(end, len(found))] -= storage.nbytes
        return found + np.cumsum(more)[:-1]

    def _freed(self, storage: Storage, kept: Collection[str]) -> int:
        """The stretch before which a storage goes if these blocks are kept."""
        found = storage.freed
        last = max((call.again for call, _ in storage.holders), default=0)
        if storage.holders and all(call.block in kept for call, _ in storage.holders if call.again == last):
            held = [call.again + 1 for call, _ in storage.holders if call.block not in kept]
            call, number = storage.holders[0]
            found = min(found, max([call.lasting[number], *held]))
        saved = (min(place.given_up, call.again) for call, place in storage.savers if call.block in kept)
        return max(found, *saved, found)

    def path(self, costs: dict[str, float], fixed: Collection[str]) -> Iterator[tuple[list[str], int]]:
        """Blocks that run again, in the order in which they are added, and the peak: at each step
        the one that frees most at the peak per second.  fixed: those that are always kept."""
        keep, again = list(self.blocks), list[str]()
        levels = self.levels(keep)
        while True:
            yield list(again), int(levels.max())
            left = [name for name in keep if name not in fixed]
            if not left:
                return
            at = int(levels.argmax())
            without = {name: self.levels([other for other in keep if other != name]) for name in left}

            def worth(name: str, without: Any = without, levels: Any = levels, at: int = at) -> float:
                return float(levels[at] - without[name][at]) / (costs[name] or 1e-12)

            best = max(left, key=worth)
            levels = without[best]
            keep.remove(best)
            again.append(best)
