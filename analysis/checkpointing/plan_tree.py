"""Plans as trees, and what a plan costs by its structure.

A subproblem (i, l) is: a_{i-1} is held by somebody else, the gradient of a_l is there (or, for
l = L in the first pass, will be), run stages i..l backward.  There are three ways:

    keep    run i keeping everything, solve (i+1, l), then run i backward
    split   run i..j-1 keeping only a_{j-1}, solve (j, l), drop a_{j-1}, solve (i, j-1)
    rerun   (only l = L) run i..L keeping nothing, take the loss, then solve (i, L) as above:
            what wrapping the last segment in a checkpoint as well amounts to

Every planner here builds such a tree.  need_bytes, the memory a subproblem takes beyond a_{i-1},
follows from its parts; simulator.py knows nothing of trees, and tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .chain import Chain
from .schedule import Action, Keep, Schedule, backward, forward, loss


class Node(NamedTuple):
    """Subproblem (first, last).  `split_at` = j for a split, 0 for keep, -1 for rerun.

    `after` is solved first ((j, l), or (i+1, l), or the rerun problem), `before` second.
    """

    first: int
    last: int
    split_at: int
    after: Node | None
    before: Node | None
    need_bytes: int
    advances: int
    advance_s: float


class PlanBuilder:
    """Makes nodes for one chain, with their cost.

    Lists are indexed by stage, or by activation, 0..L.  pending_gradient[l]: bytes of the gradient
    of a_l while stages before it run, none before the loss.  own_backward_need[l]: bytes beyond
    a_{l-1} that running stage l backward takes.  passing[l]: bytes while stage l runs, its input
    included, which goes.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        costs = chain.costs
        self.length = len(chain)
        whole = costs.activation + costs.saved
        running = costs.activation + costs.forward_temporary
        gradients = costs.gradient[1:] + costs.gradient[:-1]
        own = whole[1:] + gradients + costs.backward_temporary[1:]
        self.activation: list[int] = costs.activation.tolist()
        self.gradient: list[int] = costs.gradient.tolist()
        self.whole: list[int] = whole.tolist()
        self.saving: list[int] = (whole + costs.saving_temporary).tolist()
        self.running: list[int] = running.tolist()
        self.passing: list[int] = [0, *(costs.activation[:-1] + running[1:]).tolist()]
        self.pending_gradient: list[int] = [*self.gradient[:-1], 0]
        self.own_backward_need: list[int] = [0, *own.tolist()]
        self.forward_prefix_s = costs.forward_s.cumsum().tolist()

    def keep_need(self, stage: int, last: int) -> int:
        """Bytes beyond a_{stage-1} that stage's own two runs take, as part of (stage, last)."""
        forward_need = self.pending_gradient[last] + self.saving[stage]
        return max(forward_need, self.own_backward_need[stage])

    def sweep_need(self, first: int, last: int) -> int:
        """Bytes beyond a_{first-1} of running first..last keeping nothing in between."""
        return max(self.running[first], max(self.passing[first + 1 : last + 1], default=0))

    def keep(self, stage: int, after: Node | None = None) -> Node:
        last = stage if after is None else after.last
        need = self.keep_need(stage, last)
        if after is None:
            return Node(stage, last, 0, None, None, need, 0, 0.0)
        need = max(need, self.whole[stage] + after.need_bytes)
        return Node(stage, last, 0, after, None, need, after.advances, after.advance_s)

    def split(self, first: int, after: Node, before: Node) -> Node:
        at, last = after.first, after.last
        if before.first != first or before.last != at - 1:
            raise ValueError(f"stages {before.first}..{before.last} do not meet {at}..{last}")
        need = max(
            self.pending_gradient[last] + self.sweep_need(first, at - 1),
            self.activation[at - 1] + after.need_bytes,
            before.need_bytes,
        )
        seconds = self.forward_prefix_s[at - 1] - self.forward_prefix_s[first - 1]
        return Node(
            first,
            last,
            at,
            after,
            before,
            need,
            at - first + after.advances + before.advances,
            seconds + after.advance_s + before.advance_s,
        )

    def rerun(self, after: Node) -> Node:
        """`after` is (i, L); its stages run once more, ahead of the loss.

        During `after` the gradient of a_L exists already, which keep_need and split leave out for
        last = L, so it is added here: an upper bound that is met where the forward side peaks.
        """
        if after.last != self.length:
            raise ValueError(f"only the last segment is run again, not {after.first}..{after.last}")
        first, last = after.first, after.last
        need = max(
            self.sweep_need(first, last),
            self.activation[last] + self.gradient[last],
            after.need_bytes,
            self.gradient[last] + _forward_need(self, after),
        )
        seconds = self.forward_prefix_s[last] - self.forward_prefix_s[first - 1]
        advances = last - first + 1 + after.advances
        return Node(first, last, -1, after, None, need, advances, seconds + after.advance_s)

    def keep_all(self, first: int, last: int, after: Node | None = None) -> Node:
        """Stages first..last all kept, then `after`."""
        for stage in range(last, first - 1, -1):
            after = self.keep(stage, after)
        assert after is not None
        return after

    def segments(self, starts: Sequence[int], last: int) -> Node:
        """Segments beginning at `starts` (ascending) up to `last`, each kept whole in its turn."""
        ends = [*[start - 1 for start in starts[1:]], last]
        node = self.keep_all(starts[-1], last)
        for start, end in zip(starts[-2::-1], ends[-2::-1], strict=True):
            node = self.split(start, node, self.keep_all(start, end))
        return node


def _forward_need(build: PlanBuilder, node: Node) -> int:
    """Bytes beyond a_{first-1} at the forward runs of the right spine of (i, L)."""
    held = need = 0
    spine: Node | None = node
    while spine is not None:
        if spine.split_at > 0:
            need = max(need, held + build.sweep_need(spine.first, spine.split_at - 1))
            held += build.activation[spine.split_at - 1]
        else:
            need = max(need, held + build.saving[spine.first])
            held += build.whole[spine.first]
        spine = spine.after
    return need


@dataclass(frozen=True)
class Plan:
    """A schedule with the cost its planner predicts for it.

    peak_bytes includes a_0.  forwards counts runs of stages, advances those not paired with their
    own backward; seconds is forward, backward and the repeated forward runs.  The schedule is
    written out on first use: plans are compared far more often than they are run.
    """

    name: str
    peak_bytes: int
    forwards: int
    advances: int
    seconds: float
    write: Callable[[], Schedule] = field(repr=False, compare=False)

    @cached_property
    def schedule(self) -> Schedule:
        return self.write()


def plan_of(name: str, build: PlanBuilder, root: Node) -> Plan:
    chain = build.chain
    return Plan(
        name=name,
        peak_bytes=build.activation[0] + root.need_bytes,
        forwards=len(chain) + root.advances,
        advances=root.advances,
        seconds=chain.forward_s + chain.backward_s + root.advance_s,
        write=lambda: emit(root, len(chain)),
    )


def emit(root: Node, length: int) -> Schedule:
    """The actions of a plan, in order.  An explicit stack: trees are as deep as chains are long."""
    actions: list[Action] = []
    lost = False
    work: list[Node | int] = [root]  # a node to solve, or a stage to run backward
    # Most actions are repeated runs; a stage's are all the same one.
    passing = [forward(stage, Keep.NOTHING) for stage in range(length + 1)]

    def sweep(first: int, last: int) -> None:
        """a_{first-1} -> a_last, keeping a_{first-1} and nothing in between."""
        actions.append(forward(first, Keep.INPUT))
        actions.extend(passing[first + 1 : last + 1])

    while work:
        item = work.pop()
        if isinstance(item, int):
            if not lost:
                actions.append(loss(length))
                lost = True
            actions.append(backward(item))
            continue
        if item.split_at > 0:
            sweep(item.first, item.split_at - 1)
            assert item.before is not None
            work.append(item.before)
        elif item.split_at == 0:
            actions.append(forward(item.first, Keep.ALL))
            work.append(item.first)
        else:
            sweep(item.first, item.last)
            actions.append(loss(length))
            lost = True
        if item.after is not None:
            work.append(item.after)
    return tuple(actions)
