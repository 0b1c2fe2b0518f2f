"""The exact judge for small chains: an integer programme that knows nothing of trees.

After Checkmate (Jain et al. 2020): time is cut into phases, phase t ending with the backward of
stage L+1-t, and in each phase every stage may run forward once without interior and once with it,
in order.  Unlike the planners' trees it may drop a checkpoint before its stage has run backward and
compute it again later, so it also measures what that restriction ("persistence") costs.

Binary variables, for phase t and operation k inside it:
    R[t, k]      operation k runs
    P[t, k, v]   value v lies in memory while operation k runs (its result included)
with   R[t, k] <= sum of P[t, k, v] over the values v that can serve as its input
       P[t, k, v] <= P[t, k-1, v] + (R[t, k] if k makes v)
       sum_v size(v) P[t, k, v] + temporaries R[t, k] + gradients alive in phase t <= budget.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from analysis.arguments import byte_count

from .chain import Chain
from .optimal import InfeasibleBudgetError, smallest_budget
from .plan_tree import Plan
from .schedule import Action, Keep, Value, backward, drop, forward, loss
from .simulator import simulate

if TYPE_CHECKING:  # SciPy's solvers take long to import, and few callers ask for this judge
    from scipy.optimize import LinearConstraint

MAX_STAGES = 8


class _Programme:
    """Collects rows of a sparse constraint matrix."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.upper: list[float] = []

    def at_most(self, terms: list[tuple[int, float]], bound: float) -> None:
        row = len(self.upper)
        self.entries += [(row, column, factor) for column, factor in terms]
        self.upper.append(bound)

    def constraint(self, columns: int) -> LinearConstraint:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import coo_array

        rows, cols, factors = zip(*self.entries, strict=True)
        matrix = coo_array((factors, (rows, cols)), shape=(len(self.upper), columns))
        return LinearConstraint(matrix.tocsr(), -np.inf, np.array(self.upper))


Operation = tuple[Value, int]  # making a_l as a checkpoint, or stage l kept whole


def exact(chain: Chain, budget_bytes: int, *, time_limit_s: float = 60.0) -> Plan:
    """The fastest schedule under the budget, for at most MAX_STAGES stages.

    Raises ValueError for longer chains, InfeasibleBudgetError where nothing fits (it names the
    least budget of the planners' family), RuntimeError when the solver runs out of time.
    """
    from scipy.optimize import Bounds, milp

    budget_bytes = byte_count("budget_bytes", budget_bytes)
    length = len(chain)
    if length > MAX_STAGES:
        raise ValueError(f"{length} stages: the integer programme takes at most {MAX_STAGES}")
    costs = chain.costs
    whole = costs.activation + costs.saved
    operations: list[Operation] = []
    for stage in range(1, length + 1):
        operations += [(Value.ACTIVATION, stage), (Value.STAGE, stage)]
    values: list[Operation] = [(Value.ACTIVATION, 0), *operations]
    phases, last = range(1, length + 1), len(operations)  # index `last` is the phase's backward
    number = count()
    runs = {(t, k): next(number) for t in phases for k in range(last)}
    held = {(t, k, v): next(number) for t in phases for k in range(last + 1) for v in values}
    columns = next(number)
    lower, upper = np.zeros(columns), np.ones(columns)
    programme = _Programme()
    scale = 1.0 / max(1, budget_bytes)

    def size(value: Operation) -> float:
        kind, stage = value
        return float((costs.activation if kind is Value.ACTIVATION else whole)[stage])

    def sources(activation: int) -> list[Operation]:
        kept = [(Value.STAGE, activation)] if activation else []
        return [(Value.ACTIVATION, activation), *kept]

    for t in phases:
        stage_back = length + 1 - t
        waiting = float(costs.gradient[stage_back]) if t > 1 else 0.0
        for k in range(last + 1):
            budget_terms = [(held[t, k, v], size(v) * scale) for v in values]
            if k < last:
                made: Operation | None = operations[k]
                kind, stage = operations[k]
                needs = [(held[t, k, v], -1.0) for v in sources(stage - 1)]
                programme.at_most([(runs[t, k], 1.0), *needs], 0.0)
                temporary = costs.forward_temporary if kind is Value.ACTIVATION else (costs.saving_temporary)
                budget_terms.append((runs[t, k], float(temporary[stage]) * scale))
                programme.at_most(budget_terms, (budget_bytes - waiting) * scale)
                # A value that an operation makes is there while it runs.
                programme.at_most([(runs[t, k], 1.0), (held[t, k, operations[k]], -1.0)], 0.0)
            else:
                made = None
                lower[held[t, k, (Value.STAGE, stage_back)]] = 1.0
                needs = [(held[t, k, v], -1.0) for v in sources(stage_back - 1)]
                programme.at_most(needs, -1.0)
                gradients = costs.gradient[stage_back] + costs.gradient[stage_back - 1]
                busy = float(gradients + costs.backward_temporary[stage_back])
                programme.at_most(budget_terms, (budget_bytes - busy) * scale)
            for v in values:
                before = (t, k - 1) if k else (t - 1, last)
                terms = [(held[t, k, v], 1.0)]
                if v == made:
                    terms.append((runs[t, k], -1.0))
                if before[0] >= 1:
                    terms.append((held[before[0], before[1], v], -1.0))
                programme.at_most(terms, 1.0 if before[0] == 0 and v == values[0] else 0.0)
            for v in values:
                if v[0] is Value.STAGE:  # what a stage is kept with includes its input
                    before = (t, k - 1) if k else (t - 1, last)
                    inputs = sources(v[1] - 1)
                    pinned = [(held[t, k, source], -1.0) for source in inputs]
                    programme.at_most([(held[t, k, v], 1.0), *pinned], 0.0)
                    for source in inputs if before[0] >= 1 else []:
                        stays = [(held[*before, source], 1.0), (held[t, k, source], -1.0)]
                        programme.at_most([(held[t, k, v], 1.0), *stays], 1.0)
            # The interior of a stage that has run backward is gone.
            for stage in range(stage_back + 1, length + 1):
                upper[held[t, k, (Value.STAGE, stage)]] = 0.0
    objective = np.zeros(columns)
    for (_, k), column in runs.items():
        objective[column] = float(costs.forward_s[operations[k][1]]) + 1e-9
    result = milp(
        objective,
        constraints=programme.constraint(columns),
        integrality=np.ones(columns),
        bounds=Bounds(lower, upper),
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
    )
    if result.status == 2:
        raise InfeasibleBudgetError(budget_bytes, smallest_budget(chain))
    if result.status != 0:
        raise RuntimeError(f"integer programme: {result.message}")
    chosen = np.round(result.x).astype(bool)
    actions = _actions(chain, operations, values, chosen, runs, held)
    replay = simulate(chain, actions)
    return Plan(
        "integer programme", replay.peak_bytes, replay.forwards, replay.advances, replay.seconds, lambda: actions
    )


def _actions(
    chain: Chain, operations: list[Operation], values: list[Operation], chosen: np.ndarray, runs: dict, held: dict
) -> tuple[Action, ...]:
    """The solution as a schedule: before each operation, drop what is not held during it."""
    length, last = len(chain), len(operations)
    actions: list[Action] = []
    present: set[Operation] = {values[0]}
    for t in range(1, length + 1):
        for k in range(last + 1):
            if k < last and not chosen[runs[t, k]]:
                continue
            wanted = {v for v in values if chosen[held[t, k, v]]}
            for value in sorted(present - wanted, key=lambda v: (-v[1], v[0])):
                actions.append(drop(*value))
                present.discard(value)
            if k < last:
                kind, stage = operations[k]
                actions.append(forward(stage, Keep.INPUT if kind is Value.ACTIVATION else Keep.ALL))
                present.add(operations[k])
            else:
                stage = length + 1 - t
                if t == 1:
                    actions.append(loss(length))
                    present.discard((Value.ACTIVATION, length))
                actions.append(backward(stage))
                present -= {(Value.STAGE, stage), (Value.ACTIVATION, stage - 1)}
    return tuple(actions)
