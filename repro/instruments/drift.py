"""Scores that drift upwards along the keys: what an optimistic softmax has to survive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.optimistic import score

if TYPE_CHECKING:
    from torch import Tensor

ROW_WEIGHT = 8.0  # of the column that carries the drift; a power of two, exact in bf16


def add_drift(q: Tensor, k: Tensor, pattern: str, nats: float, scale: float) -> None:
    """Add a pattern (``analysis.optimistic``) to the scaled scores, through one column, in place.

    q, k: (B, H, N, D). The column of q becomes constant, so scores keep D - 1 random terms.
    """
    import torch

    keys = int(k.shape[2])
    drift = torch.tensor([score(pattern, nats, keys, key) for key in range(keys)])
    q[..., 0] = ROW_WEIGHT
    k[..., 0] = (drift / (ROW_WEIGHT * scale)).to(k)
