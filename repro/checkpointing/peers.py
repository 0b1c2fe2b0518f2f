"""What the framework itself offers, in the shape of a PlannedModel: call it, then backward.

segmented      torch.utils.checkpoint around segments of stages, in either mode
memory_budget  torch.compile's partitioner under activation_memory_budget
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .values import StageFn, plain


def segmented(stages: Sequence[StageFn], size: int, *, reentrant: bool = False) -> Callable[..., Any]:
    """A checkpoint around every `size` stages but the last segment, which is kept (as
    checkpoint_sequential does).  ValueError for size < 1."""
    if size < 1:
        raise ValueError(f"segments of {size} stages: need at least 1")
    starts = range(0, len(stages), size)

    def run(*state: Tensor) -> Any:
        current: Any = state
        for start in starts:
            part = stages[start : start + size]
            if start == starts[-1]:
                current = plain(tuple(part), current)
                continue

            def segment(*inputs: Tensor, part: Sequence[StageFn] = part) -> Any:
                return plain(tuple(part), inputs)

            result = checkpoint(segment, *current, use_reentrant=reentrant)
            current = result if isinstance(result, tuple) else (result,)
        return current

    return run


def memory_budget(model: nn.Module, budget: float) -> Callable[..., Any]:
    """The model compiled so that autograd keeps about `budget` (0..1) of the bytes it would keep.

    The partitioner decides per operation, by a knapsack over the joint graph; the graph is then run
    operation by operation, so that its memory is comparable with eager execution.
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"budget {budget} is not within 0..1")
    import torch._functorch.config as config

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False)

    def run(*state: Tensor) -> Any:
        with config.patch(activation_memory_budget=budget), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lru_cache")  # traced through: harmless
            return compiled(*state)

    return run
