"""A plain chain of equal layers: the textbook case."""

from __future__ import annotations

from torch import nn

from .sequential import MeanSquare, SequentialModel


class MLPChain(SequentialModel):
    """`depth` layers of linear and GELU, (rows, width) -> (rows, width), then the loss."""

    def __init__(self, depth: int, width: int) -> None:
        if depth < 1 or width < 1:
            raise ValueError(f"depth={depth}, width={width}: both must be at least 1")
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        super().__init__([*layers, MeanSquare()])
