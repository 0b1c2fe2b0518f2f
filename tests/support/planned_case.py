"""One planned training, checked: model, plan, precision, ways backward and a restart as data."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from planned_ranks import failure_on_ranks
from planned_stages import STAGES, build
from planned_training import REFUSED, Case, planned_model, same, set_seed, train

from repro.checkpointing.planned import STRATEGIES

#: Planners that need no option beside the chain.
PLAIN_STRATEGIES = ("store-all", "recompute-all", "sqrt", "exponential-recursive", "chen-search")


#: Stages that keep something of a step by design.
KEEPS_SOMETHING = {
    "remembers",
    "buffer",
    "buffer-unseen",
    "buffer-replaced",
    "power-iteration",
    "spectral",
    "batch-norm",
    "keeps",
    "keeps-graph",
    "keeps-halves",
    "keeps-dict",
}


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
            "inplace operation",
            "in-place operation",
            "a second time",
            "does not require grad",
            "not have been used in the graph",
            "Inplace update",
            "view and is being modified",
            "Checkpointing is not compatible",
            "is incompatible with",
            "once_differentiable",
            "derivative for aten",
            "not support double",
            "does not have a derivative",
            "not implemented",
            "donated buffer",
            "support double backward",
        )
    )


def _bytes_wrong(case: Case, device: str) -> str | None:
    """Peak of one step, and what a dropped result leaves."""
    if case.autocast or case.dynamic or case.way in ("twice", "retain", "penalty"):
        return None
    from repro.training.live_bytes import LiveBytes

    set_seed(case.seed)
    model = build(case.stages, case.width, case.seed).to(device)
    x = torch.randn(case.rows, case.width).to(device)
    try:
        run: Any = planned_model(case, model, x)
    except ValueError:
        return None
    report = run.verify(x)
    measured, predicted = report.measured_peak_bytes, report.predicted_peak_bytes
    off = measured - predicted
    if any(kind.startswith(("keeps", "hooks", "remembers", "fork", "shared")) for kind in case.stages):
        off = max(0, off)  # of these an upper bound
    if abs(off) > max(2**14, predicted // 100):
        return f"peak: {predicted} B predicted, {measured} B measured"
    if set(case.stages) & KEEPS_SOMETHING:
        return None
    gc.disable()
    try:
        with LiveBytes(known=[x, *model.parameters(), *model.buffers()]) as live:
            out = run(x)
            del out
            return f"{live.live_bytes} B alive after a dropped result" if live.live_bytes else None
    finally:
        gc.enable()
