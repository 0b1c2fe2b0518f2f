"""Which tensors to keep under a memory budget, when keeping each is worth its recomputation time.

The study notes choose greedily by memory per compute; the right model is a 0/1 knapsack.  Greedy,
dynamic programme over rounded-up sizes, and exact integer programme stand side by side; on a chain
the same choice (every boundary kept, interiors kept or recomputed) gives a Plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from analysis.arguments import byte_count

from .chain import Chain
from .heuristics import recompute_stages
from .optimal import InfeasibleBudgetError
from .plan_tree import Plan, PlanBuilder, plan_of


@dataclass(frozen=True)
class Item:
    """A tensor: keeping it takes `size` and saves `value` seconds."""

    size: float
    value: float


def _check(items: Sequence[Item], budget: float) -> None:
    if budget < 0:
        raise ValueError(f"budget {budget}: the smallest feasible budget is 0 (keep nothing)")
    for index, item in enumerate(items):
        if item.size < 0 or item.value < 0:
            raise ValueError(f"item {index}: size {item.size}, value {item.value} below 0")


def keep_greedy(items: Sequence[Item], budget: float) -> list[int]:
    """Indices kept, taking items by value per size while they fit.  At least half of the optimum
    is not guaranteed: one large item can be worth more than all small ones."""
    _check(items, budget)
    by_ratio = sorted(
        range(len(items)),
        key=lambda i: -(items[i].value / items[i].size if items[i].size else np.inf),
    )
    kept, used = [], 0.0
    for index in by_ratio:
        if used + items[index].size <= budget:
            kept.append(index)
            used += items[index].size
    return sorted(kept)


def keep_optimal(items: Sequence[Item], budget: float, step: float) -> list[int]:
    """Indices kept by the 0/1 knapsack with sizes rounded up to multiples of `step`.

    O(items * budget / step).  Raises ValueError for a step that is not positive.
    """
    _check(items, budget)
    if not step > 0:
        raise ValueError(f"step {step}: must be positive")
    # A size that is a multiple of the step must not lose a slot to rounding in the division.
    sizes = [int(np.ceil(round(item.size / step, 9))) for item in items]
    slots = int(np.floor(round(budget / step, 9)))
    best = np.zeros(slots + 1)
    taken = np.zeros((len(items), slots + 1), dtype=bool)
    for index, (item, size) in enumerate(zip(items, sizes, strict=True)):
        if size > slots:
            continue
        with_item = np.full(slots + 1, -np.inf)
        with_item[size:] = best[: slots + 1 - size] + item.value
        taken[index] = with_item > best
        best = np.maximum(best, with_item)
    kept, left = [], slots
    for index in range(len(items) - 1, -1, -1):
        if taken[index, left]:
            kept.append(index)
            left -= sizes[index]
    return kept[::-1]


def keep_exact(items: Sequence[Item], budget: float) -> list[int]:
    """The same by integer programme, without rounding."""
    _check(items, budget)
    if not items:
        return []
    sizes = np.array([item.size for item in items])
    values = np.array([item.value for item in items])
    result = milp(
        -values,
        constraints=LinearConstraint(sizes[None, :], -np.inf, budget),
        integrality=np.ones(len(items)),
        bounds=Bounds(0, 1),
    )
    return [int(index) for index in np.flatnonzero(np.round(result.x))]


def greedy_order(chain: Chain) -> list[int]:
    """Stages but the last by interior bytes per forward second, largest first: the notes' order in
    which to recompute."""

    def ratio(stage: int) -> float:
        seconds = chain.stages[stage - 1].forward_s
        saved = chain.stages[stage - 1].saved_bytes
        return saved / seconds if seconds else float("inf") if saved else 0.0

    return sorted(range(1, len(chain)), key=lambda stage: (-ratio(stage), stage))


def greedy(chain: Chain, budget_bytes: int, *, among: Collection[int] | None = None) -> Plan:
    """Recompute stages in greedy_order, as few as make the plan fit; only those `among` (1-based)
    if given.

    Raises InfeasibleBudgetError where even recomputing every interior does not fit; the budget it
    names is the least of this family (optimal.smallest_budget is lower: it drops boundaries too).
    """
    budget_bytes = byte_count("budget_bytes", budget_bytes)
    build = PlanBuilder(chain)
    order = [stage for stage in greedy_order(chain) if among is None or stage in among]
    least = None
    for count in range(len(order) + 1):
        plan = plan_of("greedy by ratio", build, recompute_stages(build, order[:count]))
        if plan.peak_bytes <= budget_bytes:
            return plan
        if least is None or plan.peak_bytes < least.peak_bytes:
            least = plan
    assert least is not None
    raise InfeasibleBudgetError(budget_bytes, least.peak_bytes)
