"""Schedules that move values to host memory instead of holding or recomputing them.

Memory swap is two more actions in a schedule; when moving beats recomputing is a question
of link speed, answered by `simulate`.
"""

from __future__ import annotations

from .chain import Chain
from .heuristics import every
from .schedule import Action, Keep, Op, Schedule, Value, backward, fetch, forward, loss, offload


def offload_stages(chain: Chain) -> Schedule:
    """Keep every stage whole, but on the host: two stages at a time are on the device."""
    length = len(chain)
    actions: list[Action] = []
    for stage in range(1, length + 1):
        actions.append(forward(stage, Keep.ALL))
        if stage >= 2:  # its output is the input of this stage, so it can only leave now
            actions.append(offload(Value.STAGE, stage - 1))
    actions.append(loss(length))
    for stage in range(length, 0, -1):
        if stage >= 2:
            actions.append(fetch(Value.STAGE, stage - 1))
        actions.append(backward(stage))
    return tuple(actions)


def offload_checkpoints(chain: Chain, stages: int = 1) -> Schedule:
    """Segments of `stages` stages whose inputs wait on the host until their segment's turn.

    The first segment's input is the caller's a_0, which stays.  Raises ValueError for stages < 1.
    """
    source = every(chain, stages).schedule
    starts = {a.stage for a in source if a.op is Op.FORWARD and a.keep is Keep.INPUT}
    actions: list[Action] = []
    away: set[int] = set()
    for action in source:
        needed = action.stage - 1
        if action.op is Op.FORWARD and needed in away:
            actions.append(fetch(Value.ACTIVATION, needed))
            away.remove(needed)
        actions.append(action)
        if action.op is Op.FORWARD and action.keep is Keep.INPUT and action.stage in starts:
            starts.remove(action.stage)
            if needed:
                actions.append(offload(Value.ACTIVATION, needed))
                away.add(needed)
    return tuple(actions)
