"""Gradient checkpointing in theory: chains, schedules, planners and a simulator that judges them.

A *chain* (chain.py) says what each stage of a model costs, a *schedule* (schedule.py) is the list
of actions of one training step, a *planner* returns a Plan (a schedule with its predicted cost),
and `simulate` replays any schedule and returns peak bytes, forward runs and seconds.
"""

from .chain import Chain, Stage, uniform_chain
from .heuristics import (
    chen_recursive,
    chen_search,
    every,
    exponential,
    exponential_recursive,
    recompute_all,
    selective,
    sqrt,
    store_all,
    uniform,
)
from .milp import exact
from .offloading import offload_checkpoints, offload_stages
from .optimal import InfeasibleBudgetError, OptimalTable, optimal, smallest_budget
from .plan_tree import Plan
from .revolve import revolve
from .schedule import Action, Keep, Op, Schedule, Value
from .selection import greedy
from .simulator import IllegalActionError, Replay, simulate

__all__ = [
    "Action",
    "Chain",
    "IllegalActionError",
    "InfeasibleBudgetError",
    "Keep",
    "Op",
    "OptimalTable",
    "Plan",
    "Replay",
    "Schedule",
    "Stage",
    "Value",
    "chen_recursive",
    "chen_search",
    "every",
    "exact",
    "exponential",
    "exponential_recursive",
    "greedy",
    "offload_checkpoints",
    "offload_stages",
    "optimal",
    "recompute_all",
    "revolve",
    "selective",
    "simulate",
    "smallest_budget",
    "sqrt",
    "store_all",
    "uniform",
    "uniform_chain",
]
