"""The least memory that any plan for a chain takes, exactly, in bytes.

n(i, l), the least need of subproblem (i, l), follows the recurrence of optimal.py with the time
left out:  n(i, l) = min( max(own need, whole_i + n(i+1, l)),
                          min_j max(sweep need, a_{j-1} + n(j, l), n(i, j-1)) ).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .chain import Chain
from .plan_tree import Node, PlanBuilder
from .subchains import Subchains


def _recompute_all(build: PlanBuilder) -> Node:
    node = build.keep(1)
    for stage in range(2, build.length + 1):
        node = build.split(1, build.keep(stage), node)
    return node


def _lower_bound(build: PlanBuilder) -> int:
    """Bytes beyond a_0 that running some stage with its own backward takes in any plan (it may
    have been kept before the loss, when no gradient was pending: hence `last` = L)."""
    need = build.keep_need(1, build.length)
    for stage in range(2, build.length + 1):
        need = max(need, build.activation[stage - 1] + build.keep_need(stage, build.length))
    return need


@lru_cache(maxsize=16)
def minimum_need_node(chain: Chain) -> Node:
    """A plan of least peak.  Instant where recomputing everything attains the bound that every
    plan obeys (so for most chains); O(D L) otherwise, for D distinct subchains."""
    build = PlanBuilder(chain)
    node = _recompute_all(build)
    if node.need_bytes == _lower_bound(build):
        return node
    subchains, costs = Subchains(chain), chain.costs
    index, representatives = subchains.index, subchains.representatives
    needs = np.zeros(len(representatives), dtype=np.int64)
    choices = np.zeros(len(representatives), dtype=np.int32)  # j - i of a split, 0 for keep
    for number, (first, last) in enumerate(representatives):
        best = build.keep_need(first, last)
        if first < last:
            best = max(best, build.whole[first] + int(needs[index[first + 1, last]]))
            running = costs.activation[first:last] + costs.forward_temporary[first:last]
            running[1:] += costs.activation[first : last - 1]
            need = np.maximum.accumulate(running) + build.pending_gradient[last]
            after = needs[index[first + 1 : last + 1, last]] + costs.activation[first:last]
            need = np.maximum(need, np.maximum(after, needs[index[first, first:last]]))
            split = int(np.argmin(need))
            if need[split] < best:
                best, choices[number] = int(need[split]), split + 1
        needs[number] = best
    todo, decisions = [(1, len(chain))], []
    while todo:
        first, last = todo.pop()
        split = int(choices[index[first, last]])
        decisions.append((first, last, split))
        if split:
            todo += [(first + split, last), (first, first + split - 1)]
        elif first < last:
            todo.append((first + 1, last))
    done: list[Node] = []
    for first, last, split in reversed(decisions):
        if split:
            before, after_node = done.pop(), done.pop()
            done.append(build.split(first, after_node, before))
        else:
            done.append(build.keep(first, done.pop() if first < last else None))
    return done.pop()
