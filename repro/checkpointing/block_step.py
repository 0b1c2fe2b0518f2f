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
    there is one.  lasting: of each argument, how many stretches had ended when it went (`Recorder.after`)."""

    block: str
    forward: int = 0
    again: int = NEVER
    lasting: list[int] = field(default_factory=list)


class Recorder:
    """Cuts a step into stretches where a block begins or ends to run.

    context: what is open during a stretch; what it gave is in `stretches`, in order
    follow: what blocks save is followed, and a stretch ends as well where one goes between blocks
    hold: blocks hold their arguments, which their second run needs
    after: of each stretch, how many ends of others came before, those where something went apart
    """

    def __init__(
        self, context: Callable[[], AbstractContextManager[Any]], *, follow: bool = False, hold: bool = True
    ) -> None:
        self._context, self._stack, self._follow, self.hold = context, ExitStack(), follow, hold
        self._between = False  # is no block running, and no stretch ending?
        self.stretches: list[Any] = []
        self.after: list[int] = []
        self._passed = 0
        self.calls: list[Call] = []
        self.storages: list[Storage] = []
        self._known: dict[int, Storage] = {}  # those that are there, by their address

    def cut(self, between: bool = True, passed: int = 1) -> int:
        """Ends a stretch and begins the next, whose number it gives."""
        self._between = False
        self._passed += passed
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
        call = Call(block, self.cut(between=False))
        self.calls.append(call)
        self._takes(call, given)
        del given
        yield call
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
        self._known.pop(address).freed = self.cut(passed=0) if self._between else len(self.stretches) - 1

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
        self._of: dict[str, list[Storage]] = {name: [] for name in self.blocks}
        for storage in self._storages:
            calls = [call for call, _ in (*storage.holders, *storage.savers)]
            for name in dict.fromkeys(call.block for call in calls):
                self._of[name].append(storage)
        ends = np.cumsum([region.end_bytes for region in regions])
        self._starts = ends - [region.end_bytes for region in regions]
        self._tops = np.array([region.peak_bytes for region in regions])
        for call, other in zip(self._calls, unheld.calls, strict=True):  # in the stretches of this step
            call.lasting = np.searchsorted(recorder.after, other.lasting, side="right").tolist()

    def peak(self, again: Collection[str]) -> int:
        """Of a step in which these blocks run again."""
        return int(self._levels({name for name in self.blocks if name not in again}).max())

    def path(self, costs: dict[str, float], fixed: Collection[str]) -> Iterator[tuple[list[str], int]]:
        """Blocks that run again, in the order in which they are added, and the peak: at each step
        the one that frees most at the peak per second.  fixed: those that are always kept."""
        kept, again = set(self.blocks), list[str]()
        while True:
            levels = self._levels(kept)
            yield list(again), int(levels.max())
            worth = {
                name: self._freed_at(int(levels.argmax()), name, kept) / (costs[name] or 1e-12)
                for name in self.blocks
                if name in kept and name not in fixed
            }
            if not worth:
                return
            again.append(max(worth, key=worth.__getitem__))
            kept.remove(again[-1])

    def _levels(self, kept: Collection[str]) -> Any:
        """The peak of each stretch; those that are not there are negative."""
        found = self._starts + self._tops
        for call in self._calls:
            if call.block in kept and call.again != NEVER:
                found[call.forward] = max(found[call.forward], self._starts[call.forward] + self._tops[call.again])
                found[call.again] = -NEVER
        more = np.zeros(len(found) + 1, dtype=np.int64)
        for storage in self._storages:
            begin, end = self._longer(storage, kept)
            more[min(begin, len(found))] += storage.nbytes
            more[min(end, len(found))] -= storage.nbytes
        return found + np.cumsum(more)[:-1]

    def _freed_at(self, stretch: int, name: str, kept: set[str]) -> int:
        """Bytes that go in a stretch where a block runs again that was kept."""
        found = 0
        for sign, blocks in ((1, kept), (-1, kept - {name})):
            for storage in self._of[name]:
                begin, end = self._longer(storage, blocks)
                found += sign * storage.nbytes * ((begin <= stretch < end) - (end <= stretch < begin))
        return found

    def _longer(self, storage: Storage, kept: Collection[str]) -> tuple[int, int]:
        """The stretches from which on and before which a storage is there besides if some blocks are
        kept; turned round where it goes earlier."""
        begin = end = storage.freed
        last = max((call.again for call, _ in storage.holders), default=0)
        if storage.holders and all(call.block in kept for call, _ in storage.holders if call.again == last):
            held = [call.again + 1 for call, _ in storage.holders if call.block not in kept]
            call, number = storage.holders[0]
            end = min(end, max([call.lasting[number], *held]))
        for call, place in storage.savers:
            if call.block in kept and place.given_up <= call.again:
                end = max(end, place.given_up)
            elif call.block in kept:
                end = max(end, storage.freed if call.again == last else call.again)
        if end > begin and storage.savers:  # that call's own peak is counted as such
            begin = max(begin, storage.savers[0][0].forward + 1)
        return begin, max(begin, end) if end > storage.freed else end
