"""One random planned training: model, plan, precision, ways backward and a restart, and checked.

A case is plain data, so a failure is reported as one line that anybody can run again
(`python -m repro.fuzz --of planned`).
"""

from __future__ import annotations

import copy
import gc
import json
import random as python_random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from analysis.checkpointing import smallest_budget, store_all
from repro.plain_case import PlainCase

from .case_stages import PAIRS, STAGES, build
from .memory import peak_bytes
from .planned import STRATEGIES, plan
from .profiling import profile

__all__ = ["Case", "draw", "failure", "smaller"]

WAYS = ("plain", "twice", "retain", "grad", "penalty", "kept")
WRAPS = ("ddp", "ddp-unused", "ddp-static", "fsdp2")


@dataclass(frozen=True)
class Case(PlainCase):
    """stages: names of STAGES.  strategy: a planner, or "budget" with the share of the way from the
    smallest budget to storing everything.  autocast: "" (none), "forward" (left before backward) or
    "step".  way: what is done with the result.  restart: the step before which everything is
    saved, built anew and loaded (0: never).  ranks: processes, which train a wrapped model.
    dynamic: "stages" or "around": the stages, or a module that calls the model, are compiled for
    any number of rows, which changes from step to step ("": nothing is compiled).
    """

    stages: tuple[str, ...] = ("linear", "tanh")
    strategy: str = "recompute-all"
    share: float = 0.0
    rows: int = 3
    width: int = 4
    autocast: str = ""
    way: str = "plain"
    input_gradient: bool = False
    between: bool = False
    steps: int = 1
    restart: int = 0
    dynamic: str = ""
    ranks: int = 1
    wrap: str = "ddp"
    seed: int = 0


#: Planners that need no option beside the chain.
PLAIN_STRATEGIES = ("store-all", "recompute-all", "sqrt", "exponential-recursive", "chen-search")


def draw(seed: int, form: int = 0) -> Case:
    """A random case; `form` is not needed here."""
    random = Random(seed)
    kinds = sorted(set(STAGES) - set(PAIRS.values()))
    stages: list[str] = []
    for _ in range(random.randint(1, 9)):
        stages.append(random.choice(kinds))
        if stages[-1] in PAIRS:
            stages.append(PAIRS[stages[-1]])
    ranks = 2 if random.random() < 0.02 else 1
    steps = random.choice((1, 2, 3))
    autocast = random.choice(("", "", "forward", "step"))
    compiled = ranks == 1 and random.random() < 0.05
    if compiled:
        steps, autocast = 3, ""
    return Case(
        stages=tuple(stages),
        strategy=random.choice((*PLAIN_STRATEGIES, "budget", "budget")),
        share=random.choice((0.0, 0.1, 0.3, 0.6)),
        rows=random.choice((2, 3, 8, 33)),
        width=random.choice((4, 6, 16)),
        autocast=autocast,
        way=random.choice(WAYS if ranks == 1 else ("plain", "twice", "kept")),
        input_gradient=random.random() < 0.3,
        between=random.random() < 0.5,
        steps=steps,
        restart=random.randrange(steps) if random.random() < 0.3 else 0,
        dynamic=random.choice(("stages", "around")) if compiled else "",
        ranks=ranks,
        wrap=random.choice(WRAPS),
        seed=random.randrange(2**31),
    )


def smaller(case: Case) -> Iterator[Case]:
    """Simpler neighbours of a failing case, the most drastic simplifications first."""
    plain = Case()
    for name in ("ranks", "dynamic", "autocast", "way", "input_gradient", "between", "restart",
                 "strategy", "share", "seed", "wrap"):  # fmt: skip
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    for index in range(len(case.stages)):
        rest = case.stages[:index] + case.stages[index + 1 :]
        if rest:
            yield replace(case, stages=rest)
    for name in ("steps", "rows", "width"):
        value, least = getattr(case, name), getattr(plain, name)
        for less in (least, value // 2, value - 1):
            if least <= less < value:
                yield replace(case, **{name: less})


def failure(case: Case, device: str = "cpu") -> str | None:
    """Train the plain and the planned model from the same start; where they differ, or None.

    Compared after every step, bit for bit: result, gradients, weights, buffers, and the next random
    number of each shared generator.  Without autocast the planned step's peak must be within 1 % or
    1 MiB of the prediction, and a dropped result must leave nothing alive.
    """
    unknown = [kind for kind in case.stages if kind not in STAGES]
    if unknown or case.strategy not in (*STRATEGIES, "budget"):
        raise ValueError(f"unknown stages {unknown} or strategy {case.strategy!r}")
    if case.ranks > 1:
        return _on_ranks(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _failure(case, device)


def _failure(case: Case, device: str) -> str | None:
    if case.dynamic:
        torch._dynamo.reset()  # how often something is compiled must not depend on cases before
    try:
        expected = _train(case, device, planned=False)
    except TypeError:  # a chain that cannot be: shrinking takes the join from a fork
        return None
    except RuntimeError as error:  # the plain model itself cannot do that, nor need a planned one
        return None if _plain_refuses(error) else f"plain: {error}"
    try:
        found = _train(case, device, planned=True)
    except ValueError as error:
        if "writes to the model's input" in str(error):
            return None
        raise
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in one.keys() | other.keys():
            a, b = one.get(name), other.get(name)
            if a is None or b is None or not _same(a, b):
                return f"step {step}: {name} differs"
    return _bytes_wrong(case, device)


def _plain_refuses(error: RuntimeError) -> bool:
    """In-place writes and orders of backward that autograd itself does not allow."""
    return any(
        text in str(error)
        for text in (
            "inplace operation", "in-place operation", "a second time", "does not require grad",
            "not have been used in the graph", "Inplace update", "view and is being modified",
            "Checkpointing is not compatible", "is incompatible with", "once_differentiable",
            "derivative for aten", "not support double", "does not have a derivative",
            "not implemented", "donated buffer", "support double backward",
        )
    )  # fmt: skip


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    """NaN is equal to NaN."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.full_like(tensor, 12345.0), tensor)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    python_random.seed(seed)
    np.random.seed(seed % 2**32)


def _autocast(case: Case, device: str) -> Any:
    return torch.autocast(device, torch.bfloat16) if case.autocast else nullcontext()


def _planned(case: Case, model: nn.Module, x: Tensor) -> nn.Module:
    with _autocast(case, x.device.type):
        if case.strategy != "budget":
            options: dict[str, Any] = {"strategy": case.strategy}
            return plan(model, x, repeats=0, **options)
        found = profile(model, x, repeats=0)
        least, most = smallest_budget(found.chain), store_all(found.chain).peak_bytes
        budget = least + round(case.share * (most - least)) + found.aside_bytes()
        return plan(model, x, budget_bytes=budget, profiled=found)


def _train(
    case: Case,
    device: str,
    *,
    planned: bool,
    wrap: Callable[[nn.Module], nn.Module] = lambda run: run,
) -> list[dict[str, Tensor]]:
    """What each step leaves, by name."""
    _seed(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    inputs = [
        torch.randn(case.rows + (2 * step if case.dynamic else 0), case.width, generator=generator)
        for step in range(case.steps)
    ]

    def make() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        model = build(case.stages, case.width, case.seed).to(device)
        if case.dynamic == "stages":
            compiled: list[Any] = [_compiled(stage) for stage in model]
            model = nn.Sequential(*compiled)
        run = _planned(case, model, inputs[0].to(device)) if planned else model
        if case.dynamic == "around":
            # The planned model says itself that it is not compiled.
            run = _compiled(_Around(run if planned else torch.compiler.disable(run)))
        parameters = [*model.parameters(), torch.zeros(1, requires_grad=True)]
        return model, wrap(run), torch.optim.SGD(parameters, 0.01, momentum=0.9)

    model, run, optimizer = make()
    found = []
    for step, given in enumerate(inputs):
        if case.restart and step == case.restart:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, run, optimizer = make()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        _seed(case.seed + step)
        model.zero_grad()
        left = _step(case, run, given.to(device), model)
        left |= {f"random {i}": value for i, value in enumerate(_next_numbers())}
        optimizer.step()
        left |= {name: value.detach().clone() for name, value in model.state_dict().items()}
        found.append(left)
    return found


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager", dynamic=True)


class _Around(nn.Module):
    """Compiled around a model that stays eager."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        out = self.run(x.sin() + x.shape[0])
        return out * 2 if isinstance(out, Tensor) and out.is_floating_point() else out


def _next_numbers() -> list[Tensor]:
    return [torch.rand(2), torch.tensor([python_random.random(), np.random.rand()])]


def _step(case: Case, run: nn.Module, given: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """One forward and backward; results and gradients by name."""
    x = given.requires_grad_() if case.input_gradient else given
    context = _autocast(case, given.device.type)
    left: dict[str, Tensor] = {}
    with context:
        out = run(x)
        loss = _loss(out)
        if case.way == "twice":
            loss = loss * _loss(run(2 * x))
        elif case.way == "kept":  # a result that is dropped without a backward
            run(x)
        if case.autocast == "step":
            left |= _backward(case, loss, x, model)
    if case.autocast != "step":
        if case.between:
            _disturb(model)
        left |= _backward(case, loss, x, model)
    left["loss"] = loss.detach()
    if x.grad is not None:
        left["gradient of x"] = x.grad.clone()
    left |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters()
             if p.grad is not None}  # fmt: skip
    return left


def _loss(out: Any) -> Tensor:
    leaves = torch.utils._pytree.tree_leaves(out)
    parts = [v.float().square().mean() if v.is_floating_point() else v.abs().float().mean()
             for v in leaves if isinstance(v, Tensor)]  # fmt: skip
    return torch.stack(parts).sum()


def _disturb(model: nn.Module) -> None:
    """What a program may do between forward and backward."""
    torch.rand(3)
    python_random.random()
    np.random.rand()
    model.eval()
    model.train()


def _backward(case: Case, loss: Tensor, x: Tensor, model: nn.Module) -> dict[str, Tensor]:
    if not loss.requires_grad:
        return {}
    if case.way == "retain":
        loss.backward(retain_graph=True)
        loss.backward()
    elif case.way in ("grad", "penalty"):
        wanted = [p for p in [x, *model.parameters()] if p.requires_grad]
        penalty = case.way == "penalty"
        grads = torch.autograd.grad(loss, wanted, create_graph=penalty, allow_unused=True)
        parts = [g.float().square().sum() for g in grads if g is not None and g.requires_grad]
        if penalty and parts:
            torch.stack(parts).sum().backward()
        return {f"asked {i}": g.detach().clone() for i, g in enumerate(grads) if g is not None}
    else:
        loss.backward()
    return {}


def _bytes_wrong(case: Case, device: str) -> str | None:
    """Peak of one step, and what a dropped result leaves."""
    if case.autocast or case.dynamic or case.way in ("twice", "retain", "penalty"):
        return None
    from repro.training.live_bytes import LiveBytes

    _seed(case.seed)
    model = build(case.stages, case.width, case.seed).to(device)
    x = torch.randn(case.rows, case.width).to(device)
    run: Any = _planned(case, model, x)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        loss = _loss(run(x))
        if loss.requires_grad:
            loss.backward()

    measured, predicted = peak_bytes(step, device) + x.nbytes, run.predicted_peak_bytes
    if abs(measured - predicted) > max(2**20, predicted // 100):
        return f"peak: {predicted} B predicted, {measured} B measured"
    if set(case.stages) & {"remembers", "buffer", "spectral", "batch-norm"}:
        return None  # they keep something of a step by design
    gc.disable()
    try:
        with LiveBytes(known=[x, *model.parameters(), *model.buffers()]) as live:
            out = run(x)
            del out
            return f"{live.live_bytes} B alive after a dropped result" if live.live_bytes else None
    finally:
        gc.enable()


def _on_ranks(case: Case) -> str | None:
    """The same on several processes, under a wrapper; the first rank's complaint."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank, (case.ranks, folder, case.to_json()), nprocs=case.ranks, start_method="spawn"
        )
        found: str | None = json.loads((Path(folder) / "out.json").read_text(encoding="utf-8"))
        return found


def _rank(rank: int, ranks: int, folder: str, text: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def sharded(run: nn.Module) -> nn.Module:
        fully_shard(run)
        return run

    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ddp": DistributedDataParallel,
        "ddp-unused": lambda m: DistributedDataParallel(m, find_unused_parameters=True),
        "ddp-static": lambda m: DistributedDataParallel(m, static_graph=True),
        "fsdp2": sharded,
    }
    case = Case.from_json(text)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    complaint: str | None = None
    results: list[list[dict[str, Tensor]] | str] = []
    for planned in (False, True):
        try:
            case_of_rank = replace(case, restart=0)
            results.append(_train(case_of_rank, "cpu", planned=planned, wrap=wraps[case.wrap]))
        except (RuntimeError, ValueError, TypeError) as error:
            results.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    expected, found = results
    if isinstance(expected, str):
        complaint = None  # the wrapper itself refuses this model
    elif isinstance(found, str):
        complaint = None if "writes to the model's input" in found else found
    else:
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            for name in one.keys() | other.keys():
                a, b = one.get(name), other.get(name)
                a, b = (getattr(t, "_local_tensor", t) for t in (a, b))
                if complaint is None and (a is None or b is None or not _same(a, b)):
                    complaint = f"step {step}: {name} differs on {ranks} ranks"
    if rank == 0:
        (Path(folder) / "out.json").write_text(json.dumps(complaint), encoding="utf-8")
    dist.destroy_process_group()
