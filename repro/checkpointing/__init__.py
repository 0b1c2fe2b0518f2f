"""Gradient checkpointing on real models: profile, plan, execute, measure.

    planned = plan(model, sample, budget_bytes=2 * 2**30)   # or strategy="sqrt"
    loss = criterion(planned(x), y)
    loss.backward()

`planned` trains as `model` does, with gradients equal bit for bit: of a step that would not be, it
says so.  `plan(..., verify=True)` runs one step both ways first.
"""

from analysis.checkpointing import InfeasibleBudgetError

from .joining import stages_of
from .memory import MemoryMeter, Region, memory_meter, peak_bytes
from .planned import STRATEGIES, PlannedModel, choose, plan
from .profiling import Profile, profile
from .verification import Verification

__all__ = [
    "STRATEGIES",
    "InfeasibleBudgetError",
    "MemoryMeter",
    "PlannedModel",
    "Profile",
    "Region",
    "Verification",
    "choose",
    "memory_meter",
    "peak_bytes",
    "plan",
    "profile",
    "stages_of",
]
