"""Schedules as data: the list of actions that one training step performs on a chain.

    FORWARD l, keep nothing   a_{l-1} -> a_l, a_{l-1} is given up                  (rotor's F0)
    FORWARD l, keep input     a_{l-1} -> a_l, a_{l-1} stays as a checkpoint        (rotor's Fck)
    FORWARD l, keep all       a_{l-1} -> a_l with its interior, ready for backward (rotor's Fall)
    LOSS                      the gradient of a_L appears; a_L goes unless stage L is kept
    BACKWARD l                needs a_{l-1}, stage l kept and the gradient of a_l; leaves the
                              gradient of a_{l-1}.  a_{l-1} goes too unless stage l-1 is kept
                              (nobody can need it again)
    DROP, OFFLOAD, FETCH      a checkpoint a_l, or stage l as it was kept (a_l + interior)

Who wrote a schedule does not matter to the simulator or to the executor.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    LOSS = "loss"
    DROP = "drop"
    OFFLOAD = "offload"
    FETCH = "fetch"


class Keep(StrEnum):
    NOTHING = "nothing"
    INPUT = "input"
    ALL = "all"


class Value(StrEnum):
    ACTIVATION = "activation"  # a checkpoint a_l, 0 <= l <= L
    STAGE = "stage"  # stage l kept whole: a_l and its interior


class Action(NamedTuple):
    """`keep` belongs to FORWARD, `value` to DROP, OFFLOAD and FETCH."""

    op: Op
    stage: int
    keep: Keep | None = None
    value: Value | None = None

    def __str__(self) -> str:
        detail = self.keep or self.value
        return f"{self.op} {self.stage}" + (f" ({detail})" if detail else "")


Schedule = tuple[Action, ...]


def forward(stage: int, keep: Keep) -> Action:
    return Action(Op.FORWARD, stage, keep)


def backward(stage: int) -> Action:
    return Action(Op.BACKWARD, stage)


def loss(stages: int) -> Action:
    """`stages` is L, the stage whose output the loss reads."""
    return Action(Op.LOSS, stages)


def drop(value: Value, stage: int) -> Action:
    return Action(Op.DROP, stage, value=value)


def offload(value: Value, stage: int) -> Action:
    return Action(Op.OFFLOAD, stage, value=value)


def fetch(value: Value, stage: int) -> Action:
    return Action(Op.FETCH, stage, value=value)
