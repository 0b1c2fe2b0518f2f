"""The fastest plan under a memory budget, for chains whose stages differ (Beaumont et al. 2019).

Let e(m, i, l) be the least repeated forward time of subproblem (i, l) of tree.py with m bytes
beyond a_{i-1}.  Then

    e(m, i, l) = min( e(m - whole_i, i+1, l)                                            keep
                      min_{i<j<=l} F(i..j-1) + e(m - a_{j-1}, j, l) + e(m, i, j-1) )    split

where each choice is open from the m that its own runs take.  Memory is cut into slots and sizes are
rounded up, so a plan never exceeds its budget; where the greatest common divisor of all sizes
gives few enough slots, nothing is rounded and the plan is the optimum.

Plans are optimal among those that keep a checkpoint until its stage has run backward
("persistent"), which is what every planner here makes; milp.py judges that restriction.

Work: O(D L S) for D distinct subchains i..l of the chain (L^2/2 when all stages differ, about L
when they are equal) and S slots.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from analysis.arguments import byte_count

from . import heuristics
from .chain import Chain
from .minimum import minimum_need_node
from .native import Table, library
from .plan_tree import Node, Plan, PlanBuilder, plan_of
from .revolve import repetitions, revolve
from .subchains import Subchains

MAX_TABLE_BYTES = 6 * 2**30


class InfeasibleBudgetError(ValueError):
    """No plan fits: names the smallest budget that one fits, `smallest_budget_bytes`."""

    def __init__(self, budget_bytes: int, smallest_budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.smallest_budget_bytes = smallest_budget_bytes
        super().__init__(
            f"budget of {budget_bytes} bytes: the smallest feasible budget is {smallest_budget_bytes} bytes"
        )


class OptimalTable:
    """e(m, i, l) for one chain and m = 0..slots of unit_bytes each.

    Answers any budget up to input_bytes + slots * unit_bytes; a larger one is cut to that.
    native=False fills the table with NumPy even where fill.c could.
    """

    def __init__(self, chain: Chain, unit_bytes: int, slots: int, *, native: bool = True) -> None:
        if unit_bytes < 1 or slots < 1:
            raise ValueError(f"unit_bytes={unit_bytes}, slots={slots}: both must be at least 1")
        self.chain, self.unit_bytes, self.slots = chain, unit_bytes, slots
        self.build = PlanBuilder(chain)
        self.subchains = Subchains(chain)
        limit = slots + 1
        activation = -(-chain.costs.activation // unit_bytes)
        self.activation = np.minimum(activation, limit)
        whole = -(-(chain.costs.activation + chain.costs.saved) // unit_bytes)
        self.whole = np.minimum(whole, limit)
        self.prefix_s = chain.costs.forward_s.cumsum()
        self.width = limit + int(self.activation.max())
        rows = len(self.subchains.representatives)
        itemsize = 8 if rows * self.width * 8 <= 2**27 else 4
        if rows * self.width * itemsize > MAX_TABLE_BYTES:
            raise ValueError(
                f"{len(chain)} stages at {slots} slots need a table of "
                f"{rows * self.width * itemsize} bytes, the limit is {MAX_TABLE_BYTES}: "
                "use fewer slots"
            )
        # Row r holds e(., i, l) of subchain r behind a_{i-1} empty (infinite) entries, so that
        # row[:limit] is the row already shifted by the checkpoint that a split would hold.
        self.rows = np.full((rows, self.width), np.inf, dtype=f"f{itemsize}")
        if not (native and self._fill_native()):
            for row, (first, last) in enumerate(self.subchains.representatives):
                begin = int(self.activation[first - 1])
                self.rows[row, begin : begin + limit] = self._solve(first, last)

    def _fill_native(self) -> bool:
        """The table from fill.c; False where it cannot be compiled."""
        fill = library("double" if self.rows.itemsize == 8 else "float")
        if fill is None:
            return False
        costs, length = self.chain.costs, len(self.chain)
        pending = np.array(self.build.pending_gradient)
        own = np.array(self.build.own_backward_need)
        arrays = {
            "index": self.subchains.index,
            "activation": self.activation,
            "whole": self.whole,
            "own_need": -(-own // self.unit_bytes),
            "saving": costs.activation + costs.saved + costs.saving_temporary,
            "running": costs.activation + costs.forward_temporary,
            "held": costs.activation,
            "pending": pending,
            "prefix": self.prefix_s,
            "rows": self.rows,
            "done": np.zeros(len(self.rows), dtype=np.uint8),
        }
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        table = Table(length=length, limit=self.slots + 1, width=self.width, unit=self.unit_bytes, **pointers)
        scratch = np.zeros(16 * (length + 2), dtype=np.int64)  # 16 is TILE in fill.c
        fill.fill(ctypes.byref(table), ctypes.c_void_p(scratch.ctypes.data))
        return True

    def _sweep_thresholds(self, first: int, last: int) -> NDArray[np.int64]:
        """Slots that running first..j-1 takes, for j = first+1..last."""
        costs = self.chain.costs
        running = costs.activation[first:last] + costs.forward_temporary[first:last]
        running[1:] += costs.activation[first : last - 1]
        need = np.maximum.accumulate(running) + self.build.pending_gradient[last]
        return -(-need // self.unit_bytes)

    def _keep_threshold(self, stage: int, last: int) -> int:
        return -(-self.build.keep_need(stage, last) // self.unit_bytes)

    def _solve(self, first: int, last: int) -> NDArray:
        """e(., first, last) from the rows of shorter subchains."""
        limit = self.slots + 1
        best = np.full(limit, np.inf, dtype=self.rows.dtype)
        threshold = self._keep_threshold(first, last)
        if first == last:
            best[threshold:] = 0.0
            return best
        rows, index = self.rows, self.subchains.index
        whole, held = int(self.whole[first]), int(self.activation[first])
        start = max(threshold, whole)
        if start < limit:
            after = rows[index[first + 1, last]]
            best[start:] = after[held + start - whole : held + limit - whole]
        begin = int(self.activation[first - 1])
        cost = rows[index[first + 1 : last + 1, last], :limit]
        cost += rows[index[first, first:last], begin : begin + limit]
        cost += (self.prefix_s[first:last] - self.prefix_s[first - 1])[:, None].astype(cost.dtype)
        thresholds = self._sweep_thresholds(first, last)
        tight = min(int(thresholds[-1]), limit)
        if tight:
            closed = np.arange(tight) < thresholds[:, None]
            cost[:, :tight][closed] = np.inf
        return np.minimum(best, cost.min(axis=0), out=best)

    def node(self, budget_bytes: int) -> Node | None:
        """The best plan for a budget, None where none fits after rounding."""
        slots = min((budget_bytes - self.build.activation[0]) // self.unit_bytes, self.slots)
        length = len(self.chain)
        if slots < 0 or not np.isfinite(self._cost(slots, 1, length)):
            return None
        return self._trace(int(slots), length)

    def _cost(self, slots: int, first: int, last: int) -> float:
        begin = int(self.activation[first - 1])
        return float(self.rows[self.subchains.index[first, last], begin + slots])

    def _trace(self, slots: int, length: int) -> Node:
        todo, decisions = [(slots, 1, length)], []
        while todo:
            slots, first, last = todo.pop()
            split = self._choose(slots, first, last)
            decisions.append((first, last, split))
            if split:
                todo.append((slots - int(self.activation[split - 1]), split, last))
                todo.append((slots, first, split - 1))
            elif first < last:
                todo.append((slots - int(self.whole[first]), first + 1, last))
        done: list[Node] = []
        for first, last, split in reversed(decisions):
            if split:
                before, after = done.pop(), done.pop()
                done.append(self.build.split(first, after, before))
            else:
                done.append(self.build.keep(first, done.pop() if first < last else None))
        return done.pop()

    def _choose(self, slots: int, first: int, last: int) -> int:
        """The j of the best split, or 0 for keeping `first`."""
        keep = np.inf
        if slots >= self._keep_threshold(first, last):
            keep = 0.0
            if first < last:
                left = slots - int(self.whole[first])
                keep = self._cost(left, first + 1, last) if left >= 0 else np.inf
        if first == last or keep == 0.0:
            return 0
        index, begin = self.subchains.index, int(self.activation[first - 1])
        cost = (
            self.rows[index[first + 1 : last + 1, last], slots]
            + self.rows[index[first, first:last], begin + slots]
            + self.prefix_s[first:last]
            - self.prefix_s[first - 1]
        )
        cost[self._sweep_thresholds(first, last) > slots] = np.inf
        best = int(np.argmin(cost))
        return 0 if keep <= cost[best] else first + 1 + best


@lru_cache(maxsize=4)
def _table(chain: Chain, unit_bytes: int, slots: int) -> OptimalTable:
    return OptimalTable(chain, unit_bytes, slots)


def unit_bytes(chain: Chain, budget_bytes: int, slots: int) -> tuple[int, int]:
    """(unit, gcd): the slot size for a budget.  unit is gcd times the smallest power of two that
    leaves at most `slots` slots; unit == gcd means that nothing is rounded."""
    costs = chain.costs
    sizes = np.concatenate([np.abs(column) for column in costs[:6]])
    gcd = max(1, int(np.gcd.reduce(sizes)))
    unit = gcd
    while budget_bytes - chain.input_bytes > unit * slots:
        unit *= 2
    return unit, gcd


def heuristic_plans(chain: Chain) -> list[Plan]:
    """Plans that do not depend on the budget: what the optimum competes with after rounding."""
    length = len(chain)
    segments = {max(1, min(length, round(length**0.5 * 2 ** (step / 2)))) for step in range(-6, 7)}
    plans = [heuristics.uniform(chain, count) for count in sorted(segments)]
    plans += [heuristics.sqrt(chain), heuristics.exponential(chain)]
    plans += [heuristics.exponential_recursive(chain), heuristics.chen_search(chain)]
    plans += [heuristics.chen_recursive(chain, k) for k in (1, 2, 3)]
    states = 2
    while states < length and repetitions(length, states) > 1:
        plans.append(revolve(chain, states))
        states *= 2
    return plans


@lru_cache(maxsize=16)
def _heuristic_plans(chain: Chain) -> tuple[Plan, ...]:
    return tuple(heuristic_plans(chain))


def smallest_budget(chain: Chain) -> int:
    """The least peak of any plan, in bytes, a_0 included."""
    return chain.input_bytes + minimum_need_node(chain).need_bytes


def optimal(chain: Chain, budget_bytes: int, *, slots: int = 500) -> Plan:
    """The fastest plan whose peak is at most budget_bytes (a_0 included).

    Never slower than any heuristic plan that fits, never slower for a larger budget: slot sizes
    are powers of two times the common divisor, and the next finer slot size is solved as well
    (doubling both slot size and budget never loses a plan).  Raises InfeasibleBudgetError.
    """
    budget_bytes = byte_count("budget_bytes", budget_bytes)
    everything = heuristics.store_all(chain)
    if budget_bytes >= everything.peak_bytes:
        return replace(everything, name="optimal")
    build = PlanBuilder(chain)
    least = plan_of("optimal", build, minimum_need_node(chain))
    if least.peak_bytes > budget_bytes:  # before any table is filled: that takes longest
        raise InfeasibleBudgetError(budget_bytes, least.peak_bytes)
    unit, gcd = unit_bytes(chain, budget_bytes, slots)
    budgets = [(unit, budget_bytes)]
    if unit > gcd:
        budgets.append((unit // 2, chain.input_bytes + slots * (unit // 2)))
    nodes = [_table(chain, size, slots).node(budget) for size, budget in budgets]
    plans = [plan_of("optimal", build, node) for node in nodes if node is not None]
    if unit > gcd:
        plans += [plan for plan in _heuristic_plans(chain) if plan.peak_bytes <= budget_bytes]
    return replace(min(plans or [least], key=lambda plan: plan.seconds), name="optimal")
