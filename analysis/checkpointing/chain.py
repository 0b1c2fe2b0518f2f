"""The chain: what a sequential model costs, stage by stage.

A chain of L stages maps a_0 -> a_1 -> ... -> a_L.  Stage l reads the activation a_{l-1} and
produces a_l; running it so that it can be differentiated later also produces everything it saves
(the "interior").  This is the model of Beaumont et al. 2019 (rotor) with the output counted apart
from the interior, so that a plain checkpoint and a fully kept stage share one set of numbers.

Parameters, their gradients and optimiser states are outside: they exist whatever the plan is.
Sizes are whole bytes, times are seconds.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage l of a chain.

    activation_bytes         a_l, the output
    saved_bytes              the interior: all that a differentiable run keeps beyond a_{l-1}, a_l
    gradient_bytes           dLoss/da_l; None means as large as a_l
    forward_temporary_bytes  peak of a run that keeps nothing, beyond a_{l-1} and a_l
    saving_temporary_bytes   peak of a differentiable run, beyond a_{l-1}, a_l and the interior
    backward_temporary_bytes peak of the backward, beyond a_{l-1}, a_l, the interior, the gradient
                             it reads and the one it writes.  Negative when the stage frees part
                             of its interior before the gradient it writes exists.
    forward_s, backward_s    seconds of one run
    kind                     free label by which a planner may select ("attention", "mlp", ...)
    """

    activation_bytes: int
    saved_bytes: int = 0
    gradient_bytes: int | None = None
    forward_temporary_bytes: int = 0
    saving_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    forward_s: float = 1.0
    backward_s: float = 2.0
    name: str = ""
    kind: str = ""

    def __post_init__(self) -> None:
        sizes = {
            "activation_bytes": self.activation_bytes,
            "saved_bytes": self.saved_bytes,
            "gradient_bytes": self.gradient_bytes or 0,
            "forward_temporary_bytes": self.forward_temporary_bytes,
            "saving_temporary_bytes": self.saving_temporary_bytes,
            "backward_temporary_bytes": self.backward_temporary_bytes,
        }
        for field, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                kind = type(value).__name__
                raise TypeError(f"stage {self.name!r}: {field} is {value!r}, a {kind}, not bytes")
            if not float(value).is_integer():
                raise ValueError(f"stage {self.name!r}: {field} is {value}, not whole bytes")
            if value < 0 and field != "backward_temporary_bytes":
                raise ValueError(f"stage {self.name!r}: {field} is {value}, below 0")
        for field, seconds in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
                kind = type(seconds).__name__
                raise TypeError(f"stage {self.name!r}: {field} is {seconds!r}, a {kind}")
            if not (0 <= seconds < float("inf")):
                raise ValueError(f"stage {self.name!r}: {field} is {seconds}")


class Costs(NamedTuple):
    """A chain as arrays indexed 0..L; index 0 is the chain input (interior and times are 0)."""

    activation: NDArray[np.int64]
    gradient: NDArray[np.int64]
    saved: NDArray[np.int64]
    forward_temporary: NDArray[np.int64]
    saving_temporary: NDArray[np.int64]
    backward_temporary: NDArray[np.int64]
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """Stages 1..L behind an input a_0 of input_bytes; input_gradient_bytes is 0 where the caller
    wants no gradient of the input.  Raises ValueError when there is no stage."""

    stages: tuple[Stage, ...]
    input_bytes: int
    input_gradient_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a chain needs at least 1 stage, got 0")
        for stage in self.stages:
            if not isinstance(stage, Stage):
                raise TypeError(f"{stage!r} is a {type(stage).__name__}, not a Stage of a chain")
        for name in ("input_bytes", "input_gradient_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not bytes")
            if not float(value).is_integer():
                raise ValueError(f"{name}={value} is not a whole number of bytes")
        if self.input_bytes < 0 or self.input_gradient_bytes < 0:
            raise ValueError(
                f"input_bytes={self.input_bytes}, "
                f"input_gradient_bytes={self.input_gradient_bytes}: must not be negative"
            )
        costs = self.costs
        short = np.flatnonzero(costs.backward_temporary[1:] + costs.gradient[:-1] < 0)
        if short.size:
            stage = self.stages[int(short[0])]
            raise ValueError(
                f"stage {int(short[0]) + 1} {stage.name!r}: backward_temporary_bytes "
                f"{stage.backward_temporary_bytes} is below minus the gradient it writes, "
                f"{int(costs.gradient[short[0]])}"
            )

    def __len__(self) -> int:
        return len(self.stages)

    @cached_property
    def costs(self) -> Costs:
        stages = self.stages
        gradients = [s.activation_bytes if s.gradient_bytes is None else s.gradient_bytes for s in stages]

        def sizes(first: int, rest: list[int]) -> NDArray[np.int64]:
            return np.array([first, *rest], dtype=np.int64)

        return Costs(
            activation=sizes(self.input_bytes, [s.activation_bytes for s in stages]),
            gradient=sizes(self.input_gradient_bytes, gradients),
            saved=sizes(0, [s.saved_bytes for s in stages]),
            forward_temporary=sizes(0, [s.forward_temporary_bytes for s in stages]),
            saving_temporary=sizes(0, [s.saving_temporary_bytes for s in stages]),
            backward_temporary=sizes(0, [s.backward_temporary_bytes for s in stages]),
            forward_s=np.array([0.0, *(s.forward_s for s in stages)]),
            backward_s=np.array([0.0, *(s.backward_s for s in stages)]),
        )

    @property
    def forward_s(self) -> float:
        return float(self.costs.forward_s.sum())

    @property
    def backward_s(self) -> float:
        return float(self.costs.backward_s.sum())


def uniform_chain(
    length: int,
    activation_bytes: int = 1,
    saved_bytes: int = 0,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    input_gradient: bool = True,
) -> Chain:
    """`length` equal stages: the textbook chain for which the closed forms are written."""
    stage = Stage(activation_bytes, saved_bytes, forward_s=forward_s, backward_s=backward_s)
    return Chain((stage,) * length, activation_bytes, activation_bytes if input_gradient else 0)
