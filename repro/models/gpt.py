"""A GPT-like transformer with every granularity of checkpointing that the study notes name.

One layer saves, in 16 bits with one-byte dropout masks, s·b·h·(34 + 5·a·s/h) bytes (Korthikanti et
al. 2022, Eq. 1) when attention is written out; `selective` recomputes the attention core (QKᵀ,
softmax, dropout, PV) and leaves 34·s·b·h.  torch.utils.checkpoint does the recomputing here: these
are the forms found in practice, peers of the planned schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .sequential import SequentialModel


class Granularity(StrEnum):
    """What a checkpoint is put around."""

    NONE = "none"
    OPERATION = "each operation"  # QKᵀ, softmax, dropout, PV, each by itself
    CORE = "attention core"  # the four together: Korthikanti's selective recomputation
    ATTENTION = "each attention"  # norm, projections and core
    BLOCK = "each block"
    ALTERNATE = "every other block"
    PAIRS = "every two blocks"


class Dropout(nn.Module):
    """Dropout that saves a mask of one byte an element on every device."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0] if self.p else x


@lru_cache(maxsize=8)
def _future(n: int, device: torch.device) -> Tensor:
    """(N, N), True where key j > query i.  Made once: it is data, not something a layer saves."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)


def standard_core(dropout: Dropout, wrap: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """softmax(QKᵀ/sqrt(d)) with dropout, times V, for q, k, v (B, H, N, D); causal.

    `wrap(function, *args)` runs each operation.
    """

    def scores(q: Tensor, k: Tensor) -> Tensor:
        s = torch.matmul(q, k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
        return s.masked_fill(_future(s.shape[-1], s.device), -math.inf)

    def softmax(s: Tensor) -> Tensor:
        return s.softmax(-1)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = wrap(scores, q, k)
        p = wrap(softmax, s)
        p = wrap(dropout, p)
        return wrap(torch.matmul, p, v)

    return core


def _run(function: Callable[..., Any], *args: Tensor) -> Any:
    return function(*args)


def _checkpointed(reentrant: bool) -> Callable[..., Any]:
    def run(function: Callable[..., Any], *args: Tensor) -> Any:
        return checkpoint(function, *args, use_reentrant=reentrant)

    return run


class Attention(nn.Module):
    """x + dropout(project(attention(norm(x)))), (B, N, h) -> (B, N, h).

    attention: None for the written-out core, or a function of q, k, v (B, H, N, D).
    """

    kind = "attention"

    def __init__(
        self,
        hidden: int,
        heads: int,
        dropout: float,
        granularity: Granularity,
        reentrant: bool,
        attention: Callable[..., Tensor] | None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.core_dropout, self.dropout = Dropout(dropout), Dropout(dropout)
        again = _checkpointed(reentrant)
        each = again if granularity is Granularity.OPERATION else _run
        self.core = attention or standard_core(self.core_dropout, each)
        self.wrap_core = again if granularity is Granularity.CORE else _run

    def forward(self, x: Tensor) -> Tensor:
        b, n, h = x.shape
        heads = self.qkv(self.norm(x)).view(b, n, 3, self.heads, h // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        o = self.wrap_core(self.core, q, k, v)
        return x + self.dropout(self.project(o.transpose(1, 2).reshape(b, n, h)))


class MLP(nn.Module):
    """x + dropout(down(gelu(up(norm(x))))), (B, N, h) -> (B, N, h)."""

    kind = "mlp"

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Block(nn.Module):
    """Attention and MLP as one stage."""

    kind = "block"

    def __init__(self, attention: Attention, mlp: MLP, wrap_attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention, self.mlp, self.wrap_attention = attention, mlp, wrap_attention

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.wrap_attention(self.attention, x))


class Embedding(nn.Module):
    """Token ids (B, N) -> (B, N, h)."""

    kind = "embedding"

    def __init__(self, vocabulary: int, seqlen: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.place = nn.Embedding(seqlen, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))


class Loss(nn.Module):
    """Norm, logits and a mean-square loss."""

    kind = "loss"

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x)).square().mean()


class GPT(SequentialModel):
    """`layers` layers; its stages are attentions and MLPs (stage="sublayer") or blocks ("block").

    granularity, reentrant: what torch.utils.checkpoint wraps, and in which mode
    attention: replaces the written-out core, e.g. scaled_dot_product_attention
    """

    def __init__(
        self,
        layers: int,
        *,
        hidden: int,
        heads: int,
        seqlen: int,
        vocabulary: int = 256,
        dropout: float = 0.1,
        granularity: Granularity | str = Granularity.NONE,
        reentrant: bool = False,
        attention: Callable[..., Tensor] | None = None,
        stage: str = "block",
    ) -> None:
        if hidden % heads:
            raise ValueError(f"hidden {hidden} is not a multiple of heads {heads}")
        if stage not in ("block", "sublayer"):
            raise ValueError(f"stage {stage!r} is neither 'block' nor 'sublayer'")
        self.granularity, self.reentrant = Granularity(granularity), reentrant
        around = self.granularity is Granularity.ATTENTION
        wrap = _checkpointed(reentrant) if around else _run
        stages: list[nn.Module] = []
        for _ in range(layers):
            parts = (Attention(hidden, heads, dropout, self.granularity, reentrant, attention), MLP(hidden, dropout))
            stages += [Block(*parts, wrap)] if stage == "block" else list(parts)
        super().__init__([Embedding(vocabulary, seqlen, hidden), *stages, Loss(hidden, vocabulary)])

    def forward(self, *state: Tensor) -> Any:
        (x,) = state
        again = _checkpointed(self.reentrant)
        first, *blocks, last = self.chain
        x = first(x)
        kind = self.granularity
        if kind is Granularity.PAIRS:
            for begin in range(0, len(blocks), 2):
                x = again(nn.Sequential(*blocks[begin : begin + 2]), x)
        else:
            for index, block in enumerate(blocks):
                wrapped = kind is Granularity.BLOCK or (kind is Granularity.ALTERNATE and index % 2 == 0)
                x = again(block, x) if wrapped else block(x)
        return last(x)
