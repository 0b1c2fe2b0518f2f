"""One training step of a planned model and of the plain model, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from .memory import peak_bytes
from .replay import RandomState, cuda_devices
from .state import left_alone
from .values import Values, plain, storage_bytes

if TYPE_CHECKING:
    from .planned import PlannedModel

COUNTED = (
    "activations, what stages save, gradients of activations, temporaries, the input, gradients "
    "of shared weights, weights cast by autocast"
)
NOT_COUNTED = (
    "weights, their gradients, optimiser states, the loss function and its intermediate results, "
    "memory that libraries take without the framework's allocator"
)


@dataclass(frozen=True)
class Verification:
    """What `planned.verify` found.

    largest_difference  of any gradient or result, absolute; relative_difference the same over the
                        largest entry of the tensor; 0 where all bits are equal
    where               the name of the worst tensor ("" where all are equal)
    predicted_peak_bytes, measured_peak_bytes  of the planned step, input included
    plain_peak_bytes    of the plain model's step
    """

    tensors: int
    largest_difference: float
    relative_difference: float
    where: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    plain_peak_bytes: int
    under_autocast: bool

    @property
    def equal(self) -> bool:
        return self.largest_difference == 0

    @property
    def peak_holds(self) -> bool:
        """Within 1 % or 1 MiB of the prediction; under autocast not above it by more."""
        off = self.measured_peak_bytes - self.predicted_peak_bytes
        off = max(0, off) if self.under_autocast else abs(off)
        return off <= max(2**20, self.predicted_peak_bytes // 100)

    @property
    def as_promised(self) -> bool:
        return self.equal and self.peak_holds

    def __str__(self) -> str:
        gradients = (
            f"all {self.tensors} results and gradients equal bit for bit"
            if self.equal
            else f"{self.where} differs by {self.largest_difference:.3g} "
            f"({self.relative_difference:.2%} of its largest entry)"
        )
        mib = 2**20
        return (
            f"{gradients}; peak {self.measured_peak_bytes / mib:.2f} MiB measured, "
            f"{self.predicted_peak_bytes / mib:.2f} MiB predicted, "
            f"{self.plain_peak_bytes / mib:.2f} MiB for the plain model. "
            f"Counted: {COUNTED}. Not counted: {NOT_COUNTED}."
        )


def verify(planned: PlannedModel, inputs: tuple[Any, ...]) -> Verification:
    """One step of each from the same state: sum(w * result) for fixed random w is differentiated.

    The plain step is the model's own forward where there is one, else its stages one by one.
    Everything is left as it was.  Works where the memory of the plain step is there.
    """
    unplanned: Callable[..., Any] = (
        planned.model
        if isinstance(planned.model, nn.Module) and _has_forward(planned.model)
        else lambda *given: plain(planned.stages, given, planned.profiled.unpack)
    )
    given = Values.of(inputs, "the input")
    device = given.tensors[0].device
    steps: list[tuple[dict[str, Tensor], int]] = []
    for run in (unplanned, planned):
        parts = [planned.model, *planned.stages]
        with left_alone(parts, cuda_devices(given.tensors, planned.parameters())):
            steps.append(_step(run, given, planned, device))
    (expected, plain_peak), (found, peak) = steps
    largest, relative, where = 0.0, 0.0, ""
    for name in sorted(expected.keys() | found.keys()):
        off, share = _distance(expected.get(name), found.get(name))
        if off > largest:
            largest, relative, where = off, share, name
    held = storage_bytes(given.tensors)
    return Verification(
        tensors=len(expected),
        largest_difference=largest,
        relative_difference=relative,
        where=where,
        predicted_peak_bytes=planned.predicted_peak_bytes,
        measured_peak_bytes=peak + held,
        plain_peak_bytes=plain_peak + held,
        under_autocast=any(on for _, on, _ in planned.profiled.autocast),
    )


def _has_forward(model: nn.Module) -> bool:
    return getattr(type(model).forward, "__name__", "") != "_forward_unimplemented"


def _step(
    run: Callable[..., Any], given: Values, planned: PlannedModel, device: torch.device
) -> tuple[dict[str, Tensor], int]:
    """Results and gradients by name, and the peak of forward and backward.

    As in a step of training, nobody holds a result once the loss is computed, and its gradient is
    made by the backward of the loss and freed where it is used.
    """
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in given.tensors]
    weights = dict(planned.named_parameters())
    for parameter in weights.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    again = given.rebuild(leaves)
    results: list[Callable[[], Tensor]] = []
    cotangents: list[Tensor] = []

    def forward() -> Any:
        found = _pytree.tree_leaves(run(*again))
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    with torch.enable_grad():  # the model may differentiate in its own forward
        random = RandomState.now(cuda_devices(given.tensors))
        generator = torch.Generator().manual_seed(0)
        for result in forward():
            w = torch.randn(result.shape, generator=generator).to(result.device)
            cotangents.append(w.to(result.dtype))
        random.restore()

    def step() -> None:
        produced = forward()
        results.extend(_aside(o) for o in produced)
        losses = [_Weighted.apply(o, w) for o, w in zip(produced, cotangents, strict=True) if o.requires_grad]
        del produced
        if losses:
            torch.autograd.backward(losses)

    def steps() -> None:
        """So many that the last finds what earlier ones leave behind."""
        for _ in range(planned.profiled.steady_steps):
            step()

    with torch.enable_grad():
        peak = peak_bytes(steps, device)
    found = {f"result {i}": result() for i, result in enumerate(results)}
    found |= {f"gradient of input {i}": t.grad for i, t in enumerate(leaves) if t.grad is not None}
    for name, parameter in weights.items():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.clone()
    return found, peak


class _Weighted(torch.autograd.Function):
    """Stands for sum(w * result), of which only the gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, w: Tensor) -> Tensor:
        ctx.w = w  # not saved: it was there before the step
        return torch.zeros((), device=result.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.w.clone(), None


def _aside(tensor: Tensor) -> Callable[[], Tensor]:
    """Gives the tensor back, on the CPU; until then its bytes lie where no meter counts them."""
    there = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    dtype, shape = there.dtype, there.shape
    bits = there.view(-1).view(torch.uint8).numpy().copy()
    return lambda: torch.from_numpy(bits).view(dtype).view(shape)


def _distance(expected: Tensor | None, found: Tensor | None) -> tuple[float, float]:
    """Largest difference, and over the largest expected entry; infinite where only one is there."""
    if expected is None or found is None or expected.shape != found.shape:
        return math.inf, math.inf
    if torch.equal(expected, found) or not expected.numel():
        return 0.0, 0.0
    kind = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.to(kind), found.to(kind)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0, 0.0
    off = float((a - b).abs().masked_fill(same, 0).nan_to_num(math.inf).max())
    largest = float(a.abs().nan_to_num(0, 0, 0).max())
    return off, off / largest if largest else math.inf
