"""Replays any schedule on a chain and says what it costs, or which action is impossible.

The simulator knows nothing of planners.  It keeps three sets (checkpoints a_l, stages kept whole,
gradients), applies the meaning of each action as written in schedule.py, and adds up bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .chain import Chain
from .schedule import Action, Keep, Op, Schedule, Value


class IllegalActionError(ValueError):
    """The first action that cannot be performed: its index, the action and the reason."""

    def __init__(self, index: int, action: Action | None, reason: str) -> None:
        self.index, self.action, self.reason = index, action, reason
        super().__init__(f"action {index}, {action or 'end of schedule'}: {reason}")


@dataclass(frozen=True)
class Replay:
    """What a legal schedule costs.

    peak_bytes   the most that is live on the device at once, a_0 included
    peak_index   the action during which that happens
    host_peak_bytes, moved_bytes  memory swap: most that lies on the host, and bytes moved
    forwards     forward runs of stages, `advances` those not paired with their own backward
                 (forwards - L), forwards_by_stage per stage
    seconds      computing plus moving, one after the other
    live_bytes   device bytes at the peak of each action, in order
    """

    peak_bytes: int
    peak_index: int
    host_peak_bytes: int
    moved_bytes: int
    forwards: int
    advances: int
    forwards_by_stage: tuple[int, ...]
    seconds: float
    live_bytes: tuple[int, ...]


class _Memory:
    """Device and host contents while a schedule is replayed; `live` counts the device's bytes."""

    def __init__(self, chain: Chain) -> None:
        costs = chain.costs
        self.length = len(chain)
        self.activation: list[int] = costs.activation.tolist()
        self.whole: list[int] = (costs.activation + costs.saved).tolist()
        self.gradient: list[int] = costs.gradient.tolist()
        self.temporary = {
            Keep.NOTHING: costs.forward_temporary.tolist(),
            Keep.INPUT: costs.forward_temporary.tolist(),
            Keep.ALL: costs.saving_temporary.tolist(),
        }
        self.backward_temporary: list[int] = costs.backward_temporary.tolist()
        self.checkpoints: set[int] = set()
        self.kept: set[int] = set()
        self.gradients: set[int] = set()
        self.host: set[tuple[Value, int]] = set()
        self.live = self.host_bytes = 0
        self.lost = False  # has the loss been computed?
        self.put(Value.ACTIVATION, 0)

    def size(self, value: Value, stage: int) -> int:
        return (self.activation if value is Value.ACTIVATION else self.whole)[stage]

    def device(self, value: Value) -> set[int]:
        return self.checkpoints if value is Value.ACTIVATION else self.kept

    def holds(self, activation: int) -> bool:
        return activation in self.checkpoints or activation in self.kept

    def put(self, value: Value, stage: int) -> None:
        self.device(value).add(stage)
        self.live += self.size(value, stage)

    def take(self, value: Value, stage: int) -> None:
        self.device(value).remove(stage)
        self.live -= self.size(value, stage)

    def release_checkpoint(self, activation: int) -> None:
        if activation in self.checkpoints:
            self.take(Value.ACTIVATION, activation)

    def put_gradient(self, activation: int) -> None:
        self.gradients.add(activation)
        self.live += self.gradient[activation]

    def take_gradient(self, activation: int) -> None:
        self.gradients.remove(activation)
        self.live -= self.gradient[activation]


def _forward(memory: _Memory, action: Action) -> int:
    """Returns the bytes alive during the action; raises ValueError where it is impossible."""
    stage, keep = action.stage, action.keep
    if not 1 <= stage <= memory.length:
        raise ValueError(f"there is no stage {stage}, stages are 1..{memory.length}")
    if keep is None:
        raise ValueError("it does not say what to keep")
    if not memory.holds(stage - 1):
        raise ValueError(f"its input, activation {stage - 1}, is not on the device")
    if keep is Keep.ALL:
        if stage in memory.kept or (Value.STAGE, stage) in memory.host:
            raise ValueError(f"stage {stage} is already kept")
        memory.put(Value.STAGE, stage)
    else:
        if stage in memory.checkpoints or (Value.ACTIVATION, stage) in memory.host:
            raise ValueError(f"activation {stage} is already held")
        memory.put(Value.ACTIVATION, stage)
    peak = memory.live + memory.temporary[keep][stage]
    if keep is Keep.NOTHING:
        if stage - 1 not in memory.checkpoints:
            raise ValueError(f"activation {stage - 1} belongs to kept stage {stage - 1}")
        if stage in memory.kept:
            raise ValueError(f"activation {stage - 1} is the input of kept stage {stage}")
        memory.take(Value.ACTIVATION, stage - 1)
    return peak


def _loss(memory: _Memory, action: Action) -> int:
    if memory.lost:
        raise ValueError("the loss has been computed already")
    if action.stage != memory.length or not memory.holds(memory.length):
        raise ValueError(f"it needs activation {memory.length} on the device")
    memory.lost = True
    memory.put_gradient(memory.length)
    peak = memory.live
    memory.release_checkpoint(memory.length)
    return peak


def _backward(memory: _Memory, action: Action) -> int:
    stage = action.stage
    if stage not in memory.kept:
        raise ValueError(f"stage {stage} is not kept on the device")
    if stage not in memory.gradients:
        raise ValueError(f"the gradient of activation {stage} does not exist")
    if not memory.holds(stage - 1):
        raise ValueError(f"activation {stage - 1} is not on the device")
    memory.put_gradient(stage - 1)
    peak = memory.live + memory.backward_temporary[stage]
    memory.take_gradient(stage)
    memory.take(Value.STAGE, stage)
    memory.release_checkpoint(stage - 1)
    return peak


def _drop(memory: _Memory, action: Action) -> int:
    value, stage = _value_on_device(memory, action)
    if value is Value.ACTIVATION and stage + 1 in memory.kept:
        raise ValueError(f"activation {stage} is the input of kept stage {stage + 1}")
    peak = memory.live
    memory.take(value, stage)
    return peak


def _offload(memory: _Memory, action: Action) -> int:
    value, stage = _value_on_device(memory, action)
    peak = memory.live
    memory.take(value, stage)
    memory.host.add((value, stage))
    memory.host_bytes += memory.size(value, stage)
    return peak


def _fetch(memory: _Memory, action: Action) -> int:
    value, stage = action.value, action.stage
    if value is None or (value, stage) not in memory.host:
        raise ValueError(f"{value} {stage} is not on the host")
    memory.host.remove((value, stage))
    memory.host_bytes -= memory.size(value, stage)
    memory.put(value, stage)
    return memory.live


def _value_on_device(memory: _Memory, action: Action) -> tuple[Value, int]:
    value, stage = action.value, action.stage
    if value is None or stage not in memory.device(value):
        raise ValueError(f"{value} {stage} is not on the device")
    return value, stage


_EFFECTS = {
    Op.FORWARD: _forward,
    Op.LOSS: _loss,
    Op.BACKWARD: _backward,
    Op.DROP: _drop,
    Op.OFFLOAD: _offload,
    Op.FETCH: _fetch,
}


def simulate(chain: Chain, schedule: Schedule, *, link_bytes_per_s: float | None = None) -> Replay:
    """Replay `schedule` on `chain`.

    link_bytes_per_s is the host link's speed; a schedule that moves nothing needs none.
    Raises IllegalActionError (a ValueError) naming the first impossible action, or the stage whose
    backward is missing at the end.
    """
    memory, costs = _Memory(chain), chain.costs
    peak, peak_index, host_peak, moved, seconds = memory.live, 0, 0, 0, 0.0
    counts = [0] * (len(chain) + 1)
    live: list[int] = []
    for index, action in enumerate(schedule):
        try:
            during = _EFFECTS[action.op](memory, action)
        except ValueError as error:
            raise IllegalActionError(index, action, str(error)) from None
        live.append(during)
        if during > peak:
            peak, peak_index = during, index
        if action.op is Op.FORWARD:
            counts[action.stage] += 1
            seconds += float(costs.forward_s[action.stage])
        elif action.op is Op.BACKWARD:
            seconds += float(costs.backward_s[action.stage])
        elif action.op in (Op.OFFLOAD, Op.FETCH):
            assert action.value is not None
            if link_bytes_per_s is None:
                raise IllegalActionError(index, action, "link_bytes_per_s was not given")
            size = memory.size(action.value, action.stage)
            moved += size
            seconds += size / link_bytes_per_s
            host_peak = max(host_peak, memory.host_bytes)
    if memory.gradients != {0}:
        missing = max(memory.gradients, default=len(chain))
        raise IllegalActionError(len(schedule), None, f"backward of stage {missing} never ran")
    forwards = sum(counts)
    return Replay(
        peak_bytes=peak,
        peak_index=peak_index,
        host_peak_bytes=host_peak,
        moved_bytes=moved,
        forwards=forwards,
        advances=forwards - len(chain),
        forwards_by_stage=tuple(counts[1:]),
        seconds=seconds,
        live_bytes=tuple(live),
    )
