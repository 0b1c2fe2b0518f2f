"""One random planned training: model, plan, precision, ways backward and a restart, and checked.

A case is plain data, so a failure is reported as one line that anybody can run again
(`python -m repro.fuzz --of planned`).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch

from .case_ranks import failure_on_ranks
from .case_stages import PAIRS, STAGES, build
from .case_training import REFUSED, WAYS, WRAPS, Case, loss_of, planned_model, same, set_seed, train
from .memory import peak_bytes
from .planned import STRATEGIES

__all__ = ["Case", "draw", "failure", "smaller"]

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
        return failure_on_ranks(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _failure(case, device)


def _failure(case: Case, device: str) -> str | None:
    if case.dynamic:
        torch._dynamo.reset()  # how often something is compiled must not depend on cases before
    try:
        expected = train(case, device, planned=False)
    except TypeError:  # a chain that cannot be: shrinking takes the join from a fork
        return None
    except RuntimeError as error:  # the plain model itself cannot do that, nor need a planned one
        return None if _plain_refuses(error) else f"plain: {error}"
    try:
        found = train(case, device, planned=True)
    except ValueError as error:
        if any(text in str(error) for text in REFUSED):
            return None
        raise
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in one.keys() | other.keys():
            a, b = one.get(name), other.get(name)
            if a is None or b is None or not same(a, b):
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


def _bytes_wrong(case: Case, device: str) -> str | None:
    """Peak of one step, and what a dropped result leaves."""
    if case.autocast or case.dynamic or case.way in ("twice", "retain", "penalty"):
        return None
    from repro.training.live_bytes import LiveBytes

    set_seed(case.seed)
    model = build(case.stages, case.width, case.seed).to(device)
    x = torch.randn(case.rows, case.width).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        loss = loss_of(run(x))
        if loss.requires_grad:
            loss.backward()

    def steps() -> None:
        step()
        if run.profiled.keeps_bytes:
            step()

    try:
        run: Any = planned_model(case, model, x)
    except ValueError:
        return None
    measured, predicted = peak_bytes(steps, device) + x.nbytes, run.predicted_peak_bytes
    off = measured - predicted
    if set(case.stages) & {"keeps-dict", "hooks", "hooks-size", "hooks-cpu"}:
        off = max(0, off)  # of these an upper bound
    if abs(off) > max(2**12, predicted // 100):
        return f"peak: {predicted} B predicted, {measured} B measured"
    if set(case.stages) & {"remembers", "buffer", "spectral", "batch-norm", "keeps", "keeps-dict"}:
        return None  # they keep something of a step by design
    gc.disable()
    try:
        with LiveBytes(known=[x, *model.parameters(), *model.buffers()]) as live:
            out = run(x)
            del out
            return f"{live.live_bytes} B alive after a dropped result" if live.live_bytes else None
    finally:
        gc.enable()
