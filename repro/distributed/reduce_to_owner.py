"""Gradients only where their optimiser state is: ZeRO's P_os+g on top of torch's P_os.

torch's ``ZeroRedundancyOptimizer`` gives each parameter's optimiser state to one rank and
broadcasts the updated parameter. Under DistributedDataParallel every rank still receives every
gradient. Here each gradient is reduced to its owner as soon as the backward has made it, and freed
elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from analysis.arguments import instance, whole


def owners(optimizer: ZeroRedundancyOptimizer) -> dict[Tensor, int]:
    """Which rank (in the optimiser's group) updates each parameter."""
    instance("optimizer", optimizer, ZeroRedundancyOptimizer)
    found: dict[Tensor, int] = optimizer._param_to_rank  # type: ignore[attr-defined]
    return dict(found)


class ReduceToOwner:
    """Reduces each gradient to its parameter's owner during the backward.

    Args:
        model: parameters that require gradients.
        owner: parameter -> rank in ``group``, for example ``owners(optimizer)``.
        group: the data-parallel ranks.

    Gradients are averaged. On every other rank ``.grad`` is None after the backward, so a rank
    holds the gradients of its own share only. ``remove()`` takes the hooks off.
    """

    def __init__(self, model: nn.Module, owner: Mapping[Tensor, int], group: dist.ProcessGroup | None = None) -> None:
        instance("model", model, nn.Module)
        instance("owner", owner, Mapping)
        if group is not None:
            instance("group", group, dist.ProcessGroup)
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._members = dist.get_process_group_ranks(group or dist.group.WORLD)
        missing = [n for n, p in model.named_parameters() if p.requires_grad and p not in owner]
        if missing:
            raise ValueError(f"parameters without an owner: {missing}")
        self._owner: dict[Tensor, int] = {
            p: whole(f"owner of {n}", owner[p], least=0, most=self._ranks - 1)
            for n, p in model.named_parameters()
            if p.requires_grad
        }
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._reduce) for p in model.parameters() if p.requires_grad
        ]

    def _reduce(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        owner = self._owner[parameter]
        dist.reduce(parameter.grad, self._members[owner], group=self._group)
        if owner == self._rank:
            parameter.grad /= self._ranks
        else:
            parameter.grad = None

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
