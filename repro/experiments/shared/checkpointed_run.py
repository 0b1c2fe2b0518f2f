"""A training step of attention under torch's checkpoint, counted on the host backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from analysis.algorithms import Family, find
from analysis.shapes import Tile
from analysis.traffic import Traffic
from kernels import attention
from repro.attention.reference import attention_reference, max_error
from repro.attention.views import array_of
from repro.experiments import Context
from repro.experiments.shared.host import HeadResult
from repro.measuring.cells import Cell, shape_of

Tiles = Mapping[str, Tile]


class _Attention(torch.autograd.Function):
    """One algorithm of ``kernels.attention``; what it keeps for its backward lives in ``ctx``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, backend: Any, algorithm: str, tiles: Tiles) -> Tensor:
        out, scale = torch.empty_like(q), 1 / math.sqrt(q.shape[3])
        rows = {"lse": torch.empty(q.shape[:3])} if find(algorithm).family is Family.FLASH else {}
        ctx.stats = {name: array_of(name, row) for name, row in rows.items()}
        attention.forward(
            backend,
            algorithm,
            array_of("q", q),
            array_of("k", k),
            array_of("v", v),
            array_of("out", out),
            ctx.stats,
            scale=scale,
            tile=tiles["forward"],
        )
        ctx.save_for_backward(q, k, v, out)
        ctx.run, ctx.rows = (backend, algorithm, scale, tiles["backward"]), rows
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        backend, algorithm, scale, tile = ctx.run
        q, k, v, out = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        attention.backward(
            backend,
            algorithm,
            array_of("q", q),
            array_of("k", k),
            array_of("v", v),
            array_of("out", out),
            array_of("dout", dout),
            ctx.stats,
            array_of("dq", dq),
            array_of("dk", dk),
            array_of("dv", dv),
            scale=scale,
            tile=tile,
        )
        return dq, dk, dv, None, None, None


def run_checkpointed(cell: Cell, context: Context, tiles: Tiles) -> HeadResult:
    """Forward and backward of one head on N(0, 1) inputs, the forward under a reentrant checkpoint:
    nothing of it is kept, and the backward begins with what torch then calls again.

    tiles: by pass.
    """
    shape, algorithm = shape_of(cell), str(cell["implementation"])
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, shape.seqlen_q, shape.head_dim, generator=generator).half() for _ in range(4))
    backend, operands = context.host(), [x.requires_grad_() for x in (q, k, v)]
    out = checkpoint(_Attention.apply, *operands, backend, algorithm, tiles, use_reentrant=True)
    out.backward(dout)
    right = attention_reference(q.detach(), k.detach(), v.detach(), dout)
    got = {"out": out.detach()} | {f"d{n}": x.grad for n, x in zip("qkv", operands, strict=True)}
    errors = {name: max_error(got[name], getattr(right, name)) for name in got}
    traffic = {kernel: dict(entries) for kernel, entries in backend.traffic.items()}
    return HeadResult(Traffic(traffic), errors)
