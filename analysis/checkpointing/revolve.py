"""Revolve (Griewank and Walther 2000): the least repeated forward work with s stored states.

Convention, as in the paper: the chain input is one of the s states; advances t(L, s) count forward
steps other than the L that are run together with their own backward.
"""

from __future__ import annotations

from math import comb

from analysis.arguments import whole

from .chain import Chain
from .plan_tree import Node, Plan, PlanBuilder, plan_of


def repetitions(length: int, states: int) -> int:
    """r with beta(s, r-1) < L <= beta(s, r), beta(s, t) = C(s+t, s): most runs of any step."""
    _check(length, states)
    r = 0
    while comb(states + r, states) < length:
        r += 1
    return r


def advances(length: int, states: int) -> int:
    """t(L, s) = r L - beta(s+1, r-1).  O(r) time."""
    r = repetitions(length, states)
    return r * length - (comb(states + r, r - 1) if r else 0)


def _check(length: int, states: int) -> None:
    if length < 1 or states < 1:
        raise ValueError(f"length={length}, states={states}: both must be at least 1")


def first_step(length: int, states: int) -> int:
    """Stages to advance to the next stored state: the shortest of the optimal choices.  O(r) time.

    For length, states >= 2.  Advancing j costs j + t(j, s) + t(L-j, s-1), convex in j because
    t(n+1, s) - t(n, s) = r(n+1, s).  The best j is the first with r(L-j, s-1) <= 1 + r(j+1, s);
    there r = r(L, s) lies between the two, so L-j <= beta(s-1, r) and j >= beta(s, r-2).
    """
    r = repetitions(length, states)
    return max(1, comb(states + r - 2, states), length - comb(states - 1 + r, states - 1))


def revolve(chain: Chain, states: int) -> Plan:
    """The binomial schedule for any chain of the right length; optimal when stages are equal.

    states counts a_0.  More states than stages change nothing.
    """
    states = whole("states", states)
    _check(len(chain), states)
    states, build = min(states, len(chain)), PlanBuilder(chain)

    def solve(first: int, last: int, s: int) -> Node:
        starts = []  # the right spine, walked in a loop: it can be s long
        while s > 1 and last > first:
            starts.append(first)
            first, s = first + first_step(last - first + 1, s), s - 1
        node = _one_state(build, first, last)
        for start in reversed(starts):
            s += 1
            node = build.split(start, node, solve(start, node.first - 1, s))
        return node

    return plan_of(f"revolve, {states} states", build, solve(1, len(chain), states))


def _one_state(build: PlanBuilder, first: int, last: int) -> Node:
    """Every stage from a_{first-1} again: what one state allows."""
    node = build.keep(first)
    for stage in range(first + 1, last + 1):
        node = build.split(first, build.keep(stage), node)
    return node
