"""A byte-level language model small enough to train on kernels that run on a CPU, and its text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from repro.experiments.shared.tiny_lm_sizes import BATCH, CONTEXT, HEADS, LAYERS, WIDTH

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

_NAMES = ("anna", "bela", "carl", "dora", "emil", "fay")
_THINGS = ("kite", "lamp", "boat", "drum", "coat", "fan")
_COLOURS = ("red", "blue", "green", "white")


def text(seed: int, sentences: int) -> bytes:
    """Short stories whose last sentence repeats what an earlier one said of the same person."""
    random = Random(seed)
    stories = []
    for _ in range(sentences):
        people = random.sample(_NAMES, 2)
        owned = [f"a {random.choice(_COLOURS)} {random.choice(_THINGS)}" for _ in people]
        asked = random.randrange(2)
        facts = " ".join(f"{who} has {what}." for who, what in zip(people, owned, strict=True))
        stories.append(f"{facts} so {people[asked]} has {owned[asked]}.\n")
    return "".join(stories).encode()


class Block(nn.Module):
    """Pre-norm transformer block around a given attention function."""

    def __init__(self, attention: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention = attention
        self.norm_attention = nn.LayerNorm(WIDTH, dtype=dtype)
        self.norm_mlp = nn.LayerNorm(WIDTH, dtype=dtype)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.project = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, width) → (B, N, width)."""
        batch, seqlen, _ = x.shape
        packed = self.qkv(self.norm_attention(x)).view(batch, seqlen, 3, HEADS, WIDTH // HEADS)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        mixed = self.attention(q, k, v).transpose(1, 2).reshape(batch, seqlen, WIDTH)
        x = x + self.project(mixed)
        return x + self.mlp(self.norm_mlp(x))


class TinyLM(nn.Module):
    """Bytes in, next-byte loss out. Weights depend on ``seed`` alone, not on the attention.

    Args:
        attention: (B, H, N, D) three times → (B, H, N, D), causal.
        checkpointed: recompute every block in the backward (non-reentrant).
    """

    def __init__(
        self, attention: Attention, *, checkpointed: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.checkpointed = checkpointed
        self.bytes = nn.Embedding(128, WIDTH, dtype=dtype)
        self.places = nn.Embedding(CONTEXT, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(Block(attention, dtype) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats of predicting ``batch[:, 1:]``; batch (B, N + 1) int64."""
        places = torch.arange(batch.shape[1] - 1)
        x = self.bytes(batch[:, :-1]) + self.places(places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.norm(x) @ self.bytes.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def batches(data: bytes, seed: int) -> Callable[[int], Tensor]:
    """A function step → (B, N + 1) random windows of the text, the same for every model."""
    values = torch.tensor(list(data))

    def batch(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + step)
        starts = torch.randint(0, len(values) - CONTEXT, (BATCH,), generator=generator)
        return torch.stack([values[s : s + CONTEXT + 1] for s in starts])

    return batch


def gradient(model: TinyLM, batch: Tensor) -> Tensor:
    """All parameters' gradients of the loss, one after the other."""
    grads = torch.autograd.grad(model(batch), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def same_weights(model: TinyLM, attention: Attention, *, double: bool = False) -> TinyLM:
    """A copy of the model with another attention function (and in float64)."""
    copy = TinyLM(attention, dtype=torch.float64 if double else torch.float32)
    copy.load_state_dict(model.state_dict())
    return copy


def optimizer(model: TinyLM) -> torch.optim.Optimizer:
    """AdamW with the usual settings."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def attention_of(implementation: str) -> Attention:
    """The causal attention of an implementation; "+checkpoint" is the model's affair.

    Flash runs in small tiles, so that there are several, and sums dq in a fixed order.
    """
    from repro.attention.variants import VARIANTS

    name = implementation.removesuffix("+checkpoint")
    options = {"tile": (32, 32), "deterministic": True} if name == "flash" else {}
    return partial(VARIANTS[name], causal=True, **options)
