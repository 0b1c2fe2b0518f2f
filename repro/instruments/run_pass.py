"""Run one pass of an algorithm on tensors: results, what it moved, and how far it is off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from analysis.algorithms import Family, find
from analysis.traffic import Traffic
from kernels import attention

if TYPE_CHECKING:
    from torch import Tensor

    from repro.attention.reference import Reference

__all__ = ["PassResult", "run_pass"]


@dataclass(frozen=True)
class PassResult:
    """tensors: what the pass makes, and lse where the algorithm keeps one. traffic: of the pass
    alone, counted."""

    tensors: Mapping[str, Tensor]
    traffic: Traffic

    def errors(self, want: Reference) -> dict[str, float]:
        """Largest absolute error of each result, lse aside."""
        from repro.attention.reference import max_error

        return {n: max_error(x, getattr(want, n)) for n, x in self.tensors.items() if n != "lse"}


def run_pass(
    algorithm: str,
    pass_: str,
    tensors: Mapping[str, Tensor],
    backend: Any,
    /,
    *,
    bias_gradient: bool = True,
    **options: Any,
) -> PassResult:
    """Execute a pass; before a backward the forward that it needs, which is not counted.

    Args:
        algorithm, pass_: of ``kernels.attention``.
        tensors: q, k and v (B, H, N, D), for a backward dout.
        backend: where the kernels run; what it has counted before is forgotten.
        options: of ``kernels.attention.forward``, tensors in the place of arrays; ``scale`` is
            1/√D by default.
        bias_gradient: with a bias, a backward makes its gradient too, "dbias".
    """
    import torch
    from torch import Tensor

    from repro.attention.options import DIFFERENTIABLE
    from repro.attention.views import array_of

    q, backwards = tensors["q"], pass_ == "backward"
    made = {"out": torch.full_like(q, torch.nan)}
    names: tuple[str, ...] = ("out",)
    gradients: dict[str, Any] = {}
    if backwards:
        names = ("dq", "dk", "dv")
        made |= {name: torch.full_like(tensors[name[1:]], torch.nan) for name in names}
        learned = [name for name in DIFFERENTIABLE if options.get(name) is not None]
        for name in (f"d{each}" for each in learned if bias_gradient or each != "bias"):
            made[name] = torch.full_like(options[name[1:]], torch.nan)
            gradients[name] = array_of(name, made[name])
            names = (*names, name)
    given: dict[str, Any] = {"scale": q.shape[3] ** -0.5}
    given |= {n: array_of(n, x) if isinstance(x, Tensor) else x for n, x in options.items()}
    at = {name: array_of(name, x) for name, x in {**tensors, **made}.items()}
    stats = {}
    if find(algorithm).family in (Family.FLASH, Family.HOPPER):
        made["lse"] = torch.empty(q.shape[:3])
        stats["lse"] = array_of("lse", made["lse"])
        names = (*names, "lse")
    operands = (at["q"], at["k"], at["v"], at["out"])
    backend.reset()
    # A tile that was asked for is the pass's own; of a block mask it is the block, of both passes.
    other = {"tile": None} if backwards and "block_mask" not in given else {}
    attention.forward(backend, algorithm, *operands, stats, **{**given, **other})
    if backwards:
        backend.reset()
        attention.backward(
            backend, algorithm, *operands, at["dout"], stats, at["dq"], at["dk"], at["dv"], **{**given, **gradients}
        )
    counted = Traffic({kernel: dict(entries) for kernel, entries in backend.traffic.items()})
    return PassResult({name: made[name] for name in names}, counted)
