"""Gradient checkpointing on real models: profile, plan, execute, measure.

    planned = plan(model, sample, budget_bytes=2 * 2**30)   # or strategy="sqrt"
    loss = criterion(planned(x), y)
    loss.backward()

`planned` trains as `model` does, with gradients equal bit for bit.
"""

from analysis.checkpointing import InfeasibleBudgetError

from .executor import Run
from .memory import MemoryMeter, Region, memory_meter, peak_bytes
from .planned import STRATEGIES, PlannedModel, choose, plan
from .profiling import Profile, profile, stages_of

__all__ = [
    "STRATEGIES",
    "InfeasibleBudgetError",
    "MemoryMeter",
    "PlannedModel",
    "Profile",
    "Region",
    "Run",
    "choose",
    "memory_meter",
    "peak_bytes",
    "plan",
    "profile",
    "stages_of",
]
