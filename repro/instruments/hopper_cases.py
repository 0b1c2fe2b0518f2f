"""What the guard of the Hopper kernels runs them on, and the process that does it.

    python -m repro.instruments.hopper_cases NAME...

Says "ready" once CUDA, cuBLAS and CuPy have started, "built NAME" once a form is compiled, and then
"tried NAME" or "wrong NAME reason"; so ``hopper_guard``, which reads this, knows what a silence
means.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from analysis.shapes import AttentionShape
from kernels import hopper
from kernels.hopper import ForwardForm
from repro import cli
from repro.instruments.guard_lines import BUILT, NAMES, READY, TRIED, WRONG, say
from repro.measuring import processes

if TYPE_CHECKING:
    from torch import Tensor

    from repro.instruments.gpu_work import Operands

#: Largest error against float64 for N(0, 1) inputs in bf16: results, gradients.
BOUNDS = (2e-2, 4e-2)
#: Query tiles for every multiprocessor: blocks of the persistent forms take several, and the other
#: forms run in several waves of blocks, the last of them not full.
TILES_PER_SM = 2.5
LARGEST_TILE = 192


@dataclass(frozen=True)
class Case:
    """A problem, and for the optimistic softmax an upward drift of the scores in nats."""

    shape: AttentionShape
    nats: float = 0.0

    def __str__(self) -> str:
        s = self.shape
        drift = f", drift {self.nats:g}" if self.nats else ""
        return (
            f"B={s.batch} H={s.heads}/{s.kv_heads} N={s.seqlen_q}x{s.seqlen_k} d={s.head_dim}"
            f"{', causal' if s.causal else ''}{drift}"
        )


@dataclass(frozen=True)
class Sizes:
    """How large the cases are."""

    heads: int = 16
    seqlen: int = 1024
    #: The ragged problem of two heads, with fewer tiles than a card has multiprocessors.
    few: int = 333
    #: A length whose rule picks the forms for long sequences; 0: none.
    long: int = 4224


def cases(name: str, multiprocessors: int, sizes: Sizes | None = None) -> list[Case]:
    """The problems for an algorithm or a form, causal and not.

    A ragged one of a tile or two a head; one with several tiles for every block that stays; the
    same with grouped heads, ragged, and more keys than queries; for algorithms, which pick a form
    by length, one long sequence; for the optimistic softmax one where every tile is repaired.
    """
    form, sizes = hopper.FORMS.get(name), sizes or Sizes()
    rows = TILES_PER_SM * multiprocessors * LARGEST_TILE
    batch = math.ceil(rows / (sizes.heads * sizes.seqlen))
    found = []
    for head_dim in (64, 128) if form is None else (form.head_dim,):
        for causal in (False, True):
            shape = partial(AttentionShape, head_dim=head_dim, dtype="bf16", causal=causal)
            many, ragged = sizes.seqlen, sizes.seqlen - 24
            found += [
                Case(shape(1, 2, sizes.few, sizes.few)),
                Case(shape(batch, sizes.heads, many, many)),
                Case(shape(batch, sizes.heads, ragged, ragged + 100, kv_heads=sizes.heads // 2)),
            ]
            if form is None and sizes.long:
                found.append(Case(shape(1, 2, sizes.long, sizes.long)))
        if name == hopper.OPTIMISTIC:
            found.append(Case(AttentionShape(1, 2, 333, 333, head_dim, dtype="bf16"), nats=200.0))
    return found


def build(name: str, device: str, listed: Sequence[Case]) -> None:
    """Compile what the cases launch, so that a slow compiler is not taken for a hung kernel."""
    import torch

    from kernels.host.compiler import load_kernel
    from repro.attention.launcher import backend_of
    from repro.instruments.gpu_work import kernels_of

    on_cpu = device == "cpu"
    place = torch.device("cpu") if on_cpu else torch.device(device, torch.cuda.current_device())
    backend = backend_of(place)
    compiled = load_kernel if on_cpu else backend.function  # type: ignore[attr-defined]
    for shape in {case.shape for case in listed}:
        for kernel in kernels_of(name, shape, backend):
            compiled(kernel)


def fault(name: str, listed: Sequence[Case], device: str = "cuda") -> str | None:
    """The first case for which an implementation is wrong, in one line, or None."""
    for case in listed:
        for result, error, bound in errors(name, case, device):
            if not error <= bound:
                return f"{case}: {result} is off by {error:.3g}, more than {bound}"
    return None


def errors(name: str, case: Case, device: str = "cuda") -> Iterator[tuple[str, float, float]]:
    """(result, largest error against float64, bound) of every result the implementation gives."""
    from repro.instruments.gpu_work import form_work, kernel_results

    form = hopper.FORMS.get(name)
    operands = _operands(case, device)
    results: tuple[str, ...] = ("out", "dq", "dk", "dv")
    if form is None:
        got = kernel_results(name, operands)
    else:
        run, got = form_work(form, operands)
        run()
        results = results[:1] if isinstance(form, ForwardForm) else results[1:]
    exact = _exact(case, device)
    if case.nats:  # it is about the forward's repair; and gradients grow with the drift
        results, got = results[:1], got[:1]
    for result, ours in zip(results, got, strict=True):
        error = float((ours.double() - exact[result]).abs().max())
        yield result, error, BOUNDS[result != "out"]


@lru_cache(maxsize=16)
def _operands(case: Case, device: str) -> Operands:
    from repro.instruments.drift import add_drift
    from repro.instruments.gpu_work import Operands

    operands = Operands(case.shape, device)
    if case.nats:
        scale = 1 / math.sqrt(case.shape.head_dim)
        add_drift(operands.q, operands.k, "upward", case.nats, scale)
    return operands


@lru_cache(maxsize=16)
def _exact(case: Case, device: str) -> dict[str, Tensor]:
    """out, dq, dk, dv in float64, one item of the batch at a time."""
    import torch

    from repro.instruments.exact import exact_attention

    operands = _operands(case, device)
    tensors = (operands.q, operands.k, operands.v, operands.dout)
    items = [
        exact_attention(*(t[i].double() for t in tensors), causal=case.shape.causal) for i in range(case.shape.batch)
    ]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def main(names: Sequence[str], device: str = "cuda", sizes: Sizes | None = None) -> None:
    """Run the implementations, a line or two for each.

    SystemExit with one line for one after which the card does not work any more.
    """
    from repro.instruments.warm_up import warm_up

    multiprocessors = warm_up(device)
    say(READY)
    for name in names or NAMES:
        listed = cases(name, multiprocessors, sizes)
        try:
            build(name, device, listed)
            say(BUILT, name)
            wrong = fault(name, listed, device)
        except Exception as error:  # this implementation's, and the next ones are asked still
            wrong = f"{type(error).__name__}: {error}"
        _require_working(device, name, wrong)
        say(*((TRIED, name) if wrong is None else (WRONG, name, wrong)))


def _require_working(device: str, name: str, wrong: str | None) -> None:
    if device == "cpu":
        return
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # after a memory fault every call fails
        first = str(error).splitlines()[0]
        raise SystemExit(f"{wrong or name}; then: {first}") from None


if __name__ == "__main__":
    processes.die_with_parent()
    cli.show_what_can_be_shown()
    try:
        main(sys.argv[1:])
    except RuntimeError as problem:  # its first line: the caller shows one
        raise SystemExit(str(problem).splitlines()[0]) from None
