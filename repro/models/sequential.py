"""The shape that all models here share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


class SequentialModel(nn.Module):
    """Stages run one after the other; a stage may pass a tuple of tensors on."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        super().__init__()
        self.chain = nn.ModuleList(stages)

    def stages(self) -> list[nn.Module]:
        return list(self.chain)

    def forward(self, *state: Tensor) -> Any:
        for stage in self.chain:
            result = stage(*state)
            state = result if isinstance(result, tuple) else (result,)
        return state[0] if len(state) == 1 else state


class MeanSquare(nn.Module):
    """A loss that needs no target: the mean square of its input."""

    kind = "loss"

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()
