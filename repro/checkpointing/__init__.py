"""Gradient checkpointing on real models: profile, plan, execute, measure.

    planned = plan(model, sample, budget_bytes=2 * 2**30)   # or strategy="sqrt"
    loss = criterion(planned(x), y)
    loss.backward()

`planned` trains as `model` does, with gradients equal bit for bit: of a step that would not be, it
says so.  `plan(..., verify=True)` runs one step both ways first.

A model that cannot be taken apart into stages: `plan_blocks(model, args, kwargs, budget_bytes=...)`
names the blocks to recompute.
"""

from analysis.checkpointing import InfeasibleBudgetError

from .blocks import BlockPlan, blocks_of, plan_blocks
from .joining import stages_of
from .memory import MemoryMeter, Region, memory_meter, peak_bytes
from .planned import STRATEGIES, PlannedModel, choose, plan
from .profiling import Profile, profile
from .verification import Verification

__all__ = [
    "STRATEGIES",
    "BlockPlan",
    "InfeasibleBudgetError",
    "MemoryMeter",
    "PlannedModel",
    "Profile",
    "Region",
    "Verification",
    "blocks_of",
    "choose",
    "memory_meter",
    "peak_bytes",
    "plan",
    "plan_blocks",
    "profile",
    "stages_of",
]
