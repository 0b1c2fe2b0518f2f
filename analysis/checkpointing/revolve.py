"""Revolve (Griewank and Walther 2000): the least repeated forward work with s stored states.

Convention, as in the paper: the chain input is one of the s states; advances t(L, s) count forward
steps other than the L that are run together with their own backward.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from .chain import Chain
from .tree import Builder, Node, Plan, plan_of


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


@lru_cache(maxsize=8)
def _table(length: int, states: int) -> NDArray[np.int64]:
    """t(n, s) for n = 0..length, s = 0..states; a case that cannot be solved is a large number."""
    table = np.full((length + 1, states + 1), np.iinfo(np.int64).max // 4, dtype=np.int64)
    table[0] = 0
    for s in range(1, states + 1):
        table[1:, s] = [advances(n, s) for n in range(1, length + 1)]
    return table


def revolve(chain: Chain, states: int) -> Plan:
    """The binomial schedule for any chain of the right length; optimal when stages are equal.

    states counts a_0.  More states than stages change nothing.
    """
    _check(len(chain), states)
    states = min(states, len(chain))
    table, build = _table(len(chain), states), Builder(chain)

    @cache
    def solve(first: int, last: int, s: int) -> Node:
        begin, lengths = first, []  # the right spine, walked in a loop: it can be s long
        while s > 1 and last > first:
            length = last - first + 1
            step = np.arange(1, length)
            cost = step + table[step, s] + table[length - step, s - 1]
            lengths.append(int(np.argmin(cost)) + 1)
            first, s = first + lengths[-1], s - 1
        node = _one_state(build, first, last)
        for length in reversed(lengths):
            s += 1
            node = build.split(first - length, node, solve(first - length, first - 1, s))
            first -= length
        assert first == begin
        return node

    return plan_of(f"revolve, {states} states", build, solve(1, len(chain), states))


def _one_state(build: Builder, first: int, last: int) -> Node:
    """Every stage from a_{first-1} again: what one state allows."""
    node = build.keep(first)
    for stage in range(first + 1, last + 1):
        node = build.split(first, build.keep(stage), node)
    return node
