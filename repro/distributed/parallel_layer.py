"""A transformer layer under tensor and sequence parallelism (Korthikanti et al. 2022, Figs. 4-6).

The conjugate pairs of the paper: f / f̄ around the attention and the MLP in tensor parallelism
(identity / all-reduce), g / ḡ in sequence parallelism (all-gather / reduce-scatter). Activations
are (seqlen, batch, hidden), so that a sequence shard is contiguous. Column-parallel products save
only the local shard of their input and gather it again in the backward (Section 4.2.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from analysis.arguments import flag, instance, probability, whole

# torch renamed these two; the old names warn where the new ones exist.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Copy(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Reduce(torch.autograd.Function):
    """f̄: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ReduceScatter(torch.autograd.Function):
    """ḡ: reduce-scatter along the sequence forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.group), None


class _GatherLinear(torch.autograd.Function):
    """g and the product in one: y = all_gather(x) Wᵀ + b, saving the local shard of x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return functional.linear(_all_gather(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        flat = grad.flatten(0, 1)
        dx = _reduce_scatter(grad @ weight, ctx.group)
        dw = flat.t() @ _all_gather(x, ctx.group).flatten(0, 1)
        return dx, dw, flat.sum(0), None


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    full = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    _gather(full, x.contiguous(), group=group)
    return full


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    shard = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    _scatter(shard, x.contiguous(), group=group)
    return shard


def _dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """Dropout with a one-byte mask on every device (torch's composite one keeps a float mask)."""
    if not training or probability == 0.0:
        return x
    return torch.native_dropout(x, probability, True)[0]


class ParallelTransformerLayer(nn.Module):
    """Pre-norm transformer layer: attention and a 4h GeLU MLP, each with residual and dropout.

    Args:
        hidden, heads: of the whole layer.
        group: the tensor-parallel ranks; None is one rank without communication.
        sequence_parallel: norms, dropouts and residuals work on sequence shards; input and output
            are (seqlen / ranks, batch, hidden) instead of (seqlen, batch, hidden).
        recompute: "none", or "selective": the attention matrices are recomputed in the backward.
        dropout: probability, in the three places of the paper. Ranks draw from torch's generator:
            seed it alike on all ranks in tensor parallelism, differently in sequence parallelism.

    Weights are drawn as for one rank from torch's generator and then cut, so equal seeds give the
    same layer for every number of ranks.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        recompute: str = "none",
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        hidden, heads = whole("hidden", hidden, least=1), whole("heads", heads, least=1)
        sequence_parallel = flag("sequence_parallel", sequence_parallel)
        dropout = probability("dropout", dropout)
        if group is not None:
            instance("group", group, dist.ProcessGroup)
        ranks = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        if hidden % heads or heads % ranks:
            raise ValueError(f"hidden {hidden}, heads {heads} do not divide among {ranks} ranks")
        if recompute not in ("none", "selective"):
            raise ValueError(f"recompute must be 'none' or 'selective', got {recompute!r}")
        self.group, self.heads = group, heads // ranks
        self.head_dim = hidden // heads
        self.sequence_parallel = sequence_parallel and group is not None
        self.recompute, self.dropout = recompute, dropout
        full = {
            name: nn.Linear(*size)
            for name, size in {
                "qkv": (hidden, 3 * hidden),
                "projection": (hidden, hidden),
                "up": (hidden, 4 * hidden),
                "down": (4 * hidden, hidden),
            }.items()
        }

        def cut(x: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(x.detach().chunk(ranks, dim)[rank].clone().flatten(0, 1))

        # columns: q, k, v by heads (3, heads, head_dim, hidden)
        self.qkv_weight = cut(full["qkv"].weight.view(3, hidden, hidden), 1)
        self.qkv_bias = nn.Parameter(cut(full["qkv"].bias.view(3, hidden, 1), 1).detach().view(-1))
        self.up_weight = cut(full["up"].weight.view(1, 4 * hidden, hidden), 1)
        self.up_bias = nn.Parameter(cut(full["up"].bias.view(1, -1, 1), 1).detach().view(-1))
        # rows: what comes in is already cut; the bias is added once, after the reduction
        self.projection_weight = cut(full["projection"].weight.view(1, hidden, hidden), 2)
        self.projection_bias = nn.Parameter(full["projection"].bias.detach().clone())
        self.down_weight = cut(full["down"].weight.view(1, hidden, 4 * hidden), 2)
        self.down_bias = nn.Parameter(full["down"].bias.detach().clone())
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(seqlen, batch, hidden), or its sequence shard, to the same shape.

        TypeError for what is no tensor or lies elsewhere than the weights; ValueError for another
        shape.
        """
        self._check(x)
        qkv = self._column(self.norm1(x), self.qkv_weight, self.qkv_bias)
        if self.recompute == "selective":
            heads = checkpoint(self._core, *self._split(qkv), use_reentrant=False)
        else:
            heads = self._core(*self._split(qkv))
        del qkv
        x = x + self._row(heads, self.projection_weight, self.projection_bias)
        up = self._column(self.norm2(x), self.up_weight, self.up_bias)
        return x + self._row(functional.gelu(up), self.down_weight, self.down_bias)

    def _check(self, x: Tensor) -> None:
        instance("x", x, Tensor)
        weight = self.norm1.weight
        if x.dim() != 3 or x.shape[2] != weight.shape[0]:
            raise ValueError(f"x must be (seqlen, batch, {weight.shape[0]}), got shape {tuple(x.shape)}")
        if x.device != weight.device:
            raise TypeError(f"x is on {x.device}, the weights are on {weight.device}")

    def sequence_parallel_parameters(self) -> list[nn.Parameter]:
        """Parameters used on sequence shards: their gradients must be summed over the ranks."""
        norms = [*self.norm1.parameters(), *self.norm2.parameters()]
        return [*norms, self.projection_bias, self.down_bias] if self.sequence_parallel else []

    def _column(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.group is None:
            return functional.linear(x, weight, bias)
        if self.sequence_parallel:
            gathered: Tensor = _GatherLinear.apply(x, weight, bias, self.group)
            return gathered
        return functional.linear(_Copy.apply(x, self.group), weight, bias)

    def _row(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = functional.linear(x, weight)
        if self.group is not None:
            y = (_ReduceScatter if self.sequence_parallel else _Reduce).apply(y, self.group)
        return _dropout(y + bias, self.dropout, self.training)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(s, b, 3·heads·d) to three contiguous (b·heads, s, d)."""
        seqlen, batch, _ = qkv.shape
        parts = qkv.view(seqlen, batch, 3, self.heads, self.head_dim).permute(2, 1, 3, 0, 4)
        q, k, v = (p.reshape(batch * self.heads, seqlen, self.head_dim) for p in parts)
        # A batch of one reshapes without a copy; views would keep the whole product alive.
        return q * (1 / math.sqrt(self.head_dim)), k.contiguous(), v.contiguous()

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention on (b·heads, s, d), the part that selective recomputation repeats."""
        seqlen, head_dim = q.shape[1:]
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        out = torch.bmm(_dropout(weights, self.dropout, self.training), v)
        batch = q.shape[0] // self.heads
        out = out.view(batch, self.heads, seqlen, head_dim).permute(2, 0, 1, 3)
        return out.reshape(seqlen, batch, self.heads * head_dim)
