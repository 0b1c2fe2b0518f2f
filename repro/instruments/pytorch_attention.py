"""Attention by PyTorch's own kernels, as the paper's runs of 2022 have it: every operation a kernel
of its own, the same under a checkpoint, or one of the framework's fused kernels.

With ``key_mask`` the last keys of every sequence are padding, up to 20 of them, and the mask is
added to the scores (FlashAttention 2022, section E.6).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from repro.attention.variants import VARIANTS
from repro.instruments.gpu_work import Operands, Pass
from repro.measuring.cells import Cell, shape_of

EAGER, CHECKPOINTED, FLASH2 = "standard-eager", "standard-eager-checkpointed", "sdpa-flash2"
#: Names of records -> of the variants.
FUSED = {FLASH2: "sdpa-flash", "sdpa-efficient": "sdpa-efficient", "sdpa-cudnn": "sdpa-cudnn"}
NAMES = (EAGER, CHECKPOINTED, *FUSED)
#: Operations of the eager path, as Fig. 1 names them; what precedes one runs outside its clock.
OPERATIONS = ("matmul QK^T", "mask", "softmax", "dropout", "matmul PV")
#: Where operands are made unless the caller says otherwise.
DEVICE = "cuda"
#: Keys that may be padding.
PADDED = 20


class Attention:
    """The operands of a cell, and what its implementation computes of them."""

    def __init__(self, cell: Cell, device: str = "") -> None:
        operands = Operands(shape_of(cell), device or DEVICE)
        self.leaves = tuple(t.requires_grad_() for t in (operands.q, operands.k, operands.v))
        self.dout = operands.dout
        self.dropout = float(cell.get("dropout") or 0.0)
        self.mask = padding(operands.q) if cell.get("key_mask") else None
        self.name = str(cell["implementation"])

    def forward(self) -> Tensor:
        """The output, with its graph."""
        if self.name == EAGER:
            return self.eager(*self.leaves)
        if self.name == CHECKPOINTED:
            out: Tensor = checkpoint(self.eager, *self.leaves, use_reentrant=False)
            return out
        if self.mask is not None:
            raise ValueError(f"{self.name} is run without a mask here")
        return VARIANTS[FUSED[self.name]](*self.leaves, dropout_p=self.dropout)

    def eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Operation by operation; scale, mask and softmax are kernels of their own."""
        x = (q @ k.mT) * (1.0 / math.sqrt(q.shape[-1]))
        for operation in OPERATIONS[1:-1]:
            x = self.operation(operation)(x)
        return x @ v

    def operation(self, name: str) -> Callable[[Tensor], Tensor]:
        """A step between the two products; the identity where the cell leaves it out."""
        if name == "mask" and self.mask is not None:
            mask = self.mask
            return lambda x: x + mask
        if name == "dropout" and self.dropout:
            return lambda x: torch.dropout(x, self.dropout, train=True)
        return (lambda x: torch.softmax(x, -1)) if name == "softmax" else (lambda x: x)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """dq, dk, dv; the graph stays."""
        return torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)

    def both(self) -> tuple[Tensor, ...]:
        """out, dq, dk, dv."""
        out = self.forward()
        return out, *torch.autograd.grad(out, self.leaves, self.dout)


def padding(q: Tensor) -> Tensor:
    """0 for keys that count and -inf for padding, (B, 1, 1, N): the last of every sequence, up to
    :data:`PADDED` and never all."""
    batch, seqlen = q.shape[0], q.shape[2]
    generator = torch.Generator().manual_seed(1)
    away = torch.randint(0, min(PADDED, seqlen - 1) + 1, (batch, 1), generator=generator)
    hidden = torch.arange(seqlen)[None] >= seqlen - away
    return torch.zeros(batch, 1, 1, seqlen).masked_fill(hidden[:, None, None], -math.inf).to(q)


def whole(cell: Cell, device: str = "") -> Pass:
    """A call that runs the cell's passes, for a profiler: the forward alone, or both."""
    attention = Attention(cell, device)
    if cell["pass"] == "forward+backward":
        return Pass(attention.both, attention.both)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attention.forward(),)

    return Pass(forward, forward)


def single(cell: Cell, name: str, device: str = "") -> Callable[[], Tensor]:
    """One operation of the eager forward alone, on what the ones before it leave."""
    attention = Attention(cell, device)
    q, k, v = (t.detach() for t in attention.leaves)
    scores = q @ k.mT
    if name == OPERATIONS[0]:
        return lambda: q @ k.mT
    if name == OPERATIONS[-1]:
        weights = torch.softmax(scores, -1)
        return lambda: weights @ v
    step = attention.operation(name)
    return lambda: step(scores)
