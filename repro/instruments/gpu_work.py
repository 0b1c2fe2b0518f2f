"""One pass of attention on the GPU as a call to be timed or counted.

Implementations are the kernels' algorithms and the forms of the Hopper kernels, called without the
operator around them (so that nothing but their own launches is measured), and the variants of
``repro.attention.variants`` (torch's eager path and its fused back ends).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from analysis.algorithms import PDL, Family, find, without_launch
from analysis.shapes import AttentionShape, Tile
from kernels import attention, hopper
from kernels.hopper import BackwardForm, ForwardForm
from kernels.launch import Array, Backend, Kernel
from kernels.launching.plan import Recorder, record
from repro.attention.launcher import Repeated, backend_of, launcher_for, stream_of
from repro.attention.variants import VARIANTS
from repro.attention.views import TORCH_TYPES, array_of
from repro.instruments import hopper_guard
from repro.measuring.cells import Cell, shape_of, tile_of

#: Algorithms whose kernels are also launched early.
EARLY = tuple(name + PDL for name in (hopper.ALGORITHM, hopper.DETERMINISTIC))
KERNELS = (*attention.ALGORITHMS, *EARLY)
FORMS = hopper.FORMS
#: The arrays of both passes that are given; statistics and scratch come beside them.
TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")

#: Everything of ours: what is held against the competing implementations.
OURS = (*KERNELS, *FORMS)

Work = Callable[[], object]
Driver = Callable[..., None]


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


@dataclass(frozen=True)
class Pass:
    """A call that queues one pass, and what it computes: (out,), or (dq, dk, dv)."""

    run: Work
    results: Callable[[], tuple[Tensor, ...]]

    def __call__(self) -> object:
        return self.run()


def work(
    implementation: str,
    pass_: str,
    operands: Operands,
    tile: Tile | None = None,
    order: Mapping[str, Any] | None = None,
) -> Pass:
    """A call that queues one pass. What it needs (statistics, a graph) is made here, once.

    order: ``order`` and ``wave`` of our kernels' walk in this pass.

    Raises ValueError for an unknown implementation or pass; what the implementation itself says
    when it cannot run these operands passes through.
    """
    if pass_ not in ("forward", "backward"):
        raise ValueError(f"pass_={pass_!r} is neither 'forward' nor 'backward'")
    if implementation in KERNELS:
        return _kernel_work(implementation, pass_, operands, tile, order or {})
    if order:
        raise ValueError(f"{implementation} has no order of the keys to choose")
    if implementation in FORMS:
        form = FORMS[implementation]
        forward = isinstance(form, ForwardForm)
        if forward != (pass_ == "forward"):
            other = ("forward", "backward") if forward else ("backward", "forward")
            raise ValueError("{} is a form of the {}, not of the {}".format(implementation, *other))
        _ask_guard(implementation, operands)
        run, results = form_work(form, operands)
        return Pass(run, lambda: results)
    if implementation in VARIANTS:
        return _variant_work(implementation, pass_, operands)
    raise ValueError(f"implementation {implementation!r} is not one of {(*KERNELS, *VARIANTS)}")


def cell_work(cell: Cell, device: str = "cuda") -> Pass:
    """``work`` for an experiment's cell."""
    operands = Operands(shape_of(cell), device)
    tile = tile_of(cell) if "block_m" in cell else None
    order = {name: cell[name] for name in ("order", "wave") if name in cell}
    return work(str(cell["implementation"]), str(cell["pass"]), operands, tile, order)


def kernel_results(algorithm: str, operands: Operands) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of one of our algorithms."""
    runs, results = _kernel_calls(algorithm, operands)
    for pass_ in ("forward", "backward"):
        runs(pass_, None)
    return results


def _kernel_work(algorithm: str, pass_: str, operands: Operands, tile: Tile | None, order: Mapping[str, Any]) -> Pass:
    if find(algorithm).family is Family.HOPPER:
        _ask_guard(algorithm, operands)
    run, (out, *gradients) = _kernel_calls(algorithm, operands, order={pass_: order})
    if pass_ == "backward":
        run("forward", None)
    results = (out,) if pass_ == "forward" else tuple(gradients)
    return Pass(lambda: run(pass_, tile), lambda: results)


def _ask_guard(implementation: str, operands: Operands) -> None:
    reason = hopper_guard.refusal(implementation) if operands.q.is_cuda else None
    if reason is not None:
        raise RuntimeError(reason)


def form_work(form: ForwardForm | BackwardForm, operands: Operands) -> tuple[Work, tuple[Tensor, ...]]:
    """A call that queues a Hopper pass in a form of the caller's choice, and out or dq, dk, dv."""
    run, (out, *gradients) = _kernel_calls(hopper.ALGORITHM, operands, form)
    if isinstance(form, ForwardForm):
        return partial(run, "forward", None), (out,)
    run("forward", None)
    return partial(run, "backward", None), tuple(gradients)


def _repeated(driver: Driver, arrays: dict[str, Array], on: Tensor) -> Work:
    """A call that queues what the driver launches; tensors behind the arrays stay alive."""
    plan = record(backend_of(on.device), arrays, driver)
    call, addresses = Repeated(plan, on.device), [array.pointer for array in arrays.values()]
    kept = tuple(arrays.values())

    def run() -> tuple[Array, ...]:
        call(addresses)
        return kept

    return run


def _kernel_calls(
    algorithm: str,
    operands: Operands,
    form: ForwardForm | BackwardForm | None = None,
    order: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Callable[[str, Tile | None], None], tuple[Tensor, ...]]:
    """A function of (pass, tile) that queues a pass, and out, dq, dk, dv.

    form: of the Hopper pass that it is one of. order: by pass.
    """
    q, k, v, dout = operands.q, operands.k, operands.v, operands.dout
    out, dq, dk, dv = (torch.empty_like(t) for t in (q, q, k, v))
    tensors = (q, k, v, out, dout, dq, dk, dv)
    arrays = {name: array_of(name, t) for name, t in zip(TENSORS, tensors, strict=True)}
    options: dict[str, Any] = {"scale": 1 / math.sqrt(q.shape[-1]), "causal": operands.shape.causal}
    calls: dict[tuple[str, Tile | None], Work] = {}

    def run(which: str, tile: Tile | None) -> None:
        if (which, tile) in calls:
            calls[which, tile]()
            return
        # The first forward makes the statistics that both passes are given from then on.
        given = {"which": which, "algorithm": algorithm, "form": form, "tile": tile, **options}
        given |= (order or {}).get(which, {})
        with launcher_for(q.device) as backend:
            _launch(backend, arrays, stream=stream_of(q.device), **given)
        driver = partial(_launch, **given)
        calls[which, tile] = _repeated(driver, arrays, q)

    return run, (out, dq, dk, dv)


def _launch(
    backend: Backend,
    at: dict[str, Array],
    *,
    which: str,
    algorithm: str,
    form: ForwardForm | BackwardForm | None,
    **more: Any,
) -> None:
    """Launch a pass of an algorithm, or of a form; what it keeps is added to ``at``."""
    algorithm, early = without_launch(algorithm)
    if early:
        more["pdl"] = True
    first = (at["q"], at["k"], at["v"], at["out"])
    kept = {name: array for name, array in at.items() if name not in TENSORS}
    if which == "backward":
        gradients = (at["dq"], at["dk"], at["dv"])
        if isinstance(form, BackwardForm):
            hopper.backward(backend, *first, at["dout"], kept["lse"], *gradients, form=form, **more)
        else:
            attention.backward(backend, algorithm, *first, at["dout"], kept, *gradients, **more)
        return
    if isinstance(form, ForwardForm):
        if "lse" not in kept:
            kept["lse"] = backend.empty("lse", at["q"].shape[:3], "fp32")
        hopper.forward(backend, *first, kept["lse"], form=form, **more)
    else:
        attention.forward(backend, algorithm, *first, kept, **more)
    at |= kept


def kernels_of(name: str, shape: AttentionShape, like: Backend) -> list[Kernel]:
    """The kernels that both passes of an algorithm, or the pass of a form, launch on a device."""
    recorder = Recorder(like)
    record_launches(recorder, name, shape)
    return [launch.kernel for launch in recorder.launches]


def record_launches(recorder: Recorder, name: str, shape: AttentionShape) -> None:
    """Write down what both passes of an algorithm, or the pass of a form, launch."""
    form = FORMS.get(name)
    at = {}
    for tensor in TENSORS:
        keys = tensor in ("k", "v", "dk", "dv")
        size = (
            shape.batch,
            shape.kv_heads if keys else shape.heads,
            shape.seqlen_k if keys else shape.seqlen_q,
            shape.head_dim,
        )
        at[tensor] = recorder.empty(tensor, size, shape.dtype)
    algorithm = name if form is None else hopper.ALGORITHM
    for which in ("forward",) if isinstance(form, ForwardForm) else ("forward", "backward"):
        _launch(
            recorder,
            at,
            which=which,
            algorithm=algorithm,
            form=form,
            scale=1 / math.sqrt(shape.head_dim),
            causal=shape.causal,
        )


def _variant_work(name: str, pass_: str, operands: Operands) -> Pass:
    variant, causal = VARIANTS[name], operands.shape.causal
    if pass_ == "forward":

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (variant(operands.q, operands.k, operands.v, causal=causal),)

        return Pass(forward, forward)
    leaves = [t.detach().requires_grad_() for t in (operands.q, operands.k, operands.v)]
    out = variant(*leaves, causal=causal)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, operands.dout, retain_graph=True)

    return Pass(backward, backward)
