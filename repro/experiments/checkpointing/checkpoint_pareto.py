"""Memory against time of one model under every plan: a budget sweep, heuristics, the framework.

The model is a GPT whose stages are attentions and MLPs, so stages differ in bytes and in seconds.
The framework's own answers stand beside: checkpoints around segments, and the compiler's
activation_memory_budget, which decides per operation (its times are not comparable: it runs a
decomposed graph).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from analysis.checkpointing import Chain, InfeasibleBudgetError, Plan, smallest_budget, store_all
from repro.experiments import Cell, Context, Experiment, Row
from repro.experiments.shared.checkpoint import (
    SCALE,
    SOURCES,
    case,
    device,
    formula,
    measure_step,
    plan_for,
    planned_rows,
    predicted_rows,
    rows,
    scaled,
)

LAYERS = 6
STAGES = 2 * LAYERS + 2
HEURISTICS = (
    "store-all",
    "sqrt",
    "uniform-2",
    "uniform-3",
    "uniform-6",
    "uniform-9",
    "chen-search",
    "recursive",
    "exponential",
    "recompute-all",
    "revolve-3",
)
#: Budgets as a share of the way from the least peak of any plan to storing everything.
SHARES = {"optimal": (0, 1, 2, 3, 5, 12, 20, 30, 45, 60, 80), "greedy": (45, 60, 80)}
SEGMENTS = (1, 2, 4)  # stages per torch.utils.checkpoint
COMPILER_BUDGETS = (100, 30)  # percent
#: Plans a few percent of a step apart: five steps each would not tell them apart.
TIMING: dict[str, Any] = {"repeats": 21, "seconds": 3.0}


def cells() -> list[Cell]:
    """Plans, then what the framework offers."""
    names = ["autograd", *HEURISTICS]
    plans = [Cell(implementation=name) for name in names]
    plans += [Cell(implementation=name, budget_share=share) for name, shares in SHARES.items() for share in shares]
    plans += [Cell(implementation="torch-checkpoint", stages=size) for size in SEGMENTS]
    plans += [Cell(implementation="torch-memory-budget", percent=p) for p in COMPILER_BUDGETS]
    for one in plans:
        one |= {"model": "gpt", "depth": LAYERS}
    return plans


def _plan(chain: Chain, one: Cell) -> Plan:
    budget = None
    if "budget_share" in one:
        least, most = smallest_budget(chain), store_all(chain).peak_bytes
        budget = least + (most - least) * int(one["budget_share"]) // 100
    return plan_for(chain, str(one["implementation"]), budget)


def predict(one: Cell) -> Iterable[Row]:
    """Peak and relative time on the chain of formulas; none for what the framework decides."""
    if one["implementation"] in ("autograd", "torch-checkpoint", "torch-memory-budget"):
        return ()
    chain = formula("gpt", LAYERS)
    try:
        plan = _plan(chain, one)
    except InfeasibleBudgetError:  # greedy keeps every boundary, so it starts higher
        return ()
    return predicted_rows(one, chain, plan)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """A metered step and timed ones."""
    from repro.checkpointing.peers import memory_budget, segmented

    found = case("gpt", LAYERS, 1)
    name = str(one["implementation"])
    run: Callable[..., Any] = found.model
    if name == "torch-checkpoint":
        run = segmented(found.profiled.stages, int(one["stages"]))
    elif name == "torch-memory-budget":
        run = memory_budget(found.model, int(one["percent"]) / 100)
        run(*found.state).backward()  # compiles
    elif name != "autograd":
        return planned_rows(found, _plan(found.profiled.chain, one), **TIMING)
    step = measure_step(run, found.model, found.state, baseline=found.model, **TIMING)
    return rows(step)


EXPERIMENT = Experiment(
    "checkpoint-pareto",
    lambda: scaled(cells()),
    predict,
    measure,
    device=device(),
    scale=SCALE,
    sources=SOURCES,
    seconds=90,
    on_demand=True,
)
