"""The study notes' planner: recompute stages by saved bytes per second of forward, until it fits.

Every boundary is kept, and each interior kept or recomputed.
"""

from __future__ import annotations

from analysis.arguments import byte_count

from .chain import Chain
from .heuristics import recompute_stages
from .optimal import InfeasibleBudgetError
from .plan_tree import Plan, PlanBuilder, plan_of


def greedy_order(chain: Chain) -> list[int]:
    """Stages but the last by interior bytes per forward second, largest first: the notes' order in
    which to recompute."""

    def ratio(stage: int) -> float:
        seconds = chain.stages[stage - 1].forward_s
        saved = chain.stages[stage - 1].saved_bytes
        return saved / seconds if seconds else float("inf") if saved else 0.0

    return sorted(range(1, len(chain)), key=lambda stage: (-ratio(stage), stage))


def greedy(chain: Chain, budget_bytes: int) -> Plan:
    """Recompute stages in greedy_order, as few as make the plan fit.

    Raises InfeasibleBudgetError where even recomputing every interior does not fit; the budget it
    names is the least of this family (optimal.smallest_budget is lower: it drops boundaries too).
    """
    budget_bytes = byte_count("budget_bytes", budget_bytes)
    build = PlanBuilder(chain)
    order = greedy_order(chain)
    least = None
    for count in range(len(order) + 1):
        plan = plan_of("greedy by ratio", build, recompute_stages(build, order[:count]))
        if plan.peak_bytes <= budget_bytes:
            return plan
        if least is None or plan.peak_bytes < least.peak_bytes:
            least = plan
    assert least is not None
    raise InfeasibleBudgetError(budget_bytes, least.peak_bytes)
