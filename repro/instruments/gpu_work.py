"""One pass of attention on the GPU as a call to be timed or counted.

Implementations are the kernels' algorithms and the forms of the Hopper forward, called without the
operator around them (so that nothing but their own launches is measured), and the variants of
``repro.attention.variants`` (torch's eager path and its fused back ends).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from analysis.shapes import AttentionShape, Tile
from kernels import attention, hopper
from kernels.hopper_forms import FORWARD_FORMS, ForwardForm
from kernels.launch import Array
from repro.attention import engine
from repro.attention.variants import VARIANTS
from repro.experiments import Cell
from repro.experiments._attention import shape_of, tile_of
from repro.instruments import hopper_guard

TORCH_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
KERNELS = attention.ALGORITHMS
#: Forms of the Hopper forward by name, whatever the rule would choose for a shape.
FORMS = {f"{hopper.ALGORITHM} {form.name}": form for form in FORWARD_FORMS}

Work = Callable[[], object]


class Operands:
    """q, k, v, dout ~ N(0, 1) on one device, shared by the implementations of a cell."""

    def __init__(self, shape: AttentionShape, device: str = "cuda") -> None:
        self.shape = shape
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(heads: int, seqlen: int) -> Tensor:
            size = (shape.batch, heads, seqlen, shape.head_dim)
            values = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
            return values.to(TORCH_TYPES[shape.dtype])

        self.q = normal(shape.heads, shape.seqlen_q)
        self.k = normal(shape.kv_heads, shape.seqlen_k)
        self.v = normal(shape.kv_heads, shape.seqlen_k)
        self.dout = normal(shape.heads, shape.seqlen_q)


def work(implementation: str, pass_: str, operands: Operands, tile: Tile | None = None) -> Work:
    """A call that queues one pass. What it needs (statistics, a graph) is made here, once.

    Raises ValueError for an unknown implementation or pass; what the implementation itself says
    when it cannot run these operands passes through.
    """
    if pass_ not in ("forward", "backward"):
        raise ValueError(f"pass_={pass_!r} is neither 'forward' nor 'backward'")
    if implementation in KERNELS:
        return _kernel_work(implementation, pass_, operands, tile)
    if implementation in FORMS:
        if pass_ == "backward":
            raise ValueError(f"{implementation} is a form of the forward, not of the backward")
        _ask_guard(operands)
        return form_work(FORMS[implementation], operands)[0]
    if implementation in VARIANTS:
        return _variant_work(implementation, pass_, operands)
    raise ValueError(f"implementation {implementation!r} is not one of {(*KERNELS, *VARIANTS)}")


def cell_work(cell: Cell, device: str = "cuda") -> Work:
    """``work`` for an experiment's cell."""
    operands = Operands(shape_of(cell), device)
    tile = tile_of(cell) if "block_m" in cell else None
    return work(str(cell["implementation"]), str(cell["pass"]), operands, tile)


def kernel_results(algorithm: str, operands: Operands) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of one of our algorithms."""
    runs, results = _kernel_calls(algorithm, operands)
    for pass_ in ("forward", "backward"):
        runs(pass_, None)
    return results


def _kernel_work(algorithm: str, pass_: str, operands: Operands, tile: Tile | None) -> Work:
    if algorithm in attention.HOPPER:
        _ask_guard(operands)
    run, _ = _kernel_calls(algorithm, operands)
    if pass_ == "backward":
        run("forward", None)
    return lambda: run(pass_, tile)


def _ask_guard(operands: Operands) -> None:
    reason = hopper_guard.refusal() if operands.q.is_cuda else None
    if reason is not None:
        raise RuntimeError(reason)


def form_work(form: ForwardForm, operands: Operands) -> tuple[Work, Tensor]:
    """A call that queues the Hopper forward in a form of the caller's choice, and its out."""
    q, k, v = (engine.array_of(n, getattr(operands, n)) for n in ("q", "k", "v"))
    out = torch.empty_like(operands.q)
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    results = (engine.array_of("out", out), engine.array_of("lse", lse))
    scale, causal = 1 / math.sqrt(out.shape[-1]), operands.shape.causal

    def run() -> None:
        with engine.launcher_for(out) as backend:
            stream = torch.cuda.current_stream().cuda_stream if out.is_cuda else None
            hopper.forward(
                backend, q, k, v, *results, scale=scale, causal=causal, form=form, stream=stream
            )

    return run, out


def _kernel_calls(
    algorithm: str, operands: Operands
) -> tuple[Callable[[str, Tile | None], None], tuple[Tensor, ...]]:
    """A function of (pass, tile) that queues a pass, and out, dq, dk, dv."""
    q, k, v, dout = operands.q, operands.k, operands.v, operands.dout
    out, dq, dk, dv = (torch.empty_like(t) for t in (q, q, k, v))
    arrays = {n: engine.array_of(n, t) for n, t in (("q", q), ("k", k), ("v", v), ("out", out))}
    arrays |= {n: engine.array_of(n, t) for n, t in (("dout", dout), ("dq", dq))}
    arrays |= {n: engine.array_of(n, t) for n, t in (("dk", dk), ("dv", dv))}
    stats: dict[str, Array] = {}
    options: dict[str, Any] = {"scale": 1 / math.sqrt(q.shape[-1]), "causal": operands.shape.causal}

    def run(which: str, with_tile: Tile | None) -> None:
        with engine.launcher_for(q) as backend:
            stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else None
            first = (arrays["q"], arrays["k"], arrays["v"], arrays["out"])
            if which == "forward":
                attention.forward(
                    backend, algorithm, *first, stats, tile=with_tile, stream=stream, **options
                )
            else:
                attention.backward(
                    backend, algorithm, *first, arrays["dout"], stats,
                    arrays["dq"], arrays["dk"], arrays["dv"],
                    tile=with_tile, stream=stream, **options,
                )  # fmt: skip

    return run, (out, dq, dk, dv)


def _variant_work(name: str, pass_: str, operands: Operands) -> Work:
    variant, causal = VARIANTS[name], operands.shape.causal
    if pass_ == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return variant(operands.q, operands.k, operands.v, causal=causal)

        return forward
    leaves = [t.detach().requires_grad_() for t in (operands.q, operands.k, operands.v)]
    out = variant(*leaves, causal=causal)
    return lambda: torch.autograd.grad(out, leaves, operands.dout, retain_graph=True)
