"""Turns a real model into a chain: bytes and seconds of every stage, measured one stage at a time.

Only one activation and one stage's interior are alive at any moment, so a model that would not fit
with everything stored can be profiled all the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from analysis.checkpointing import Chain, Stage

from .memory import MemoryMeter, Region, memory_meter
from .replay import RandomState, StageFn, State, as_state, call_again, cuda_devices, storage_bytes


@dataclass(frozen=True)
class Profile:
    """A chain and the callables that its stages are.

    shared are the parameters that more than one stage uses.
    """

    chain: Chain
    stages: tuple[StageFn, ...]
    shared: tuple[nn.Parameter, ...] = field(default=(), repr=False)


def stages_of(model: Any) -> list[StageFn]:
    """The stages of a sequential model: an nn.Sequential, an object with a `stages()` method, or
    any iterable of callables.  TypeError for anything else, ValueError when there is none."""
    if isinstance(model, nn.Sequential | nn.ModuleList):
        found: list[StageFn] = list(model)
    elif callable(getattr(model, "stages", None)):
        found = list(model.stages())
    elif isinstance(model, Iterable):
        found = list(model)
    else:
        raise TypeError(
            f"{type(model).__name__} is not sequential: need nn.Sequential, a stages() method or "
            "an iterable of callables"
        )
    if not found:
        raise ValueError("the model has 0 stages")
    for stage in found:
        if not callable(stage):
            raise TypeError(f"stage {type(stage).__name__} cannot be called")
    return found


class Joined(nn.Module):
    """Stages that must run as one, because one returns its input or writes to it."""

    def __init__(self, parts: Sequence[StageFn]) -> None:
        super().__init__()
        self.parts = list(parts)
        self.modules_of_parts = nn.ModuleList(p for p in parts if isinstance(p, nn.Module))

    @property
    def kind(self) -> str:
        return getattr(self.parts[0], "kind", "")

    def forward(self, *state: Tensor) -> State:
        for number, part in enumerate(self.parts):
            state = as_state(part(*state), f"part {number}")
        return state


def join_stages(stages: Sequence[StageFn], inputs: State) -> list[StageFn]:
    """Stages such that each makes its output anew: one that returns a view of its input, or writes
    to it, is joined with the stage before (a first one with the stage after).

    Raises ValueError when the first stage writes to the model's input.
    """
    groups: list[list[StageFn]] = []
    open_group = True  # does the next stage belong to the last group whatever it does?
    state = inputs
    with torch.no_grad():
        for number, stage in enumerate(stages, start=1):
            versions = [tensor._version for tensor in state]
            before = {tensor.untyped_storage()._cdata for tensor in state}
            after = as_state(call_again(stage, state), f"stage {number}")
            written = any(t._version != v for t, v in zip(state, versions, strict=True))
            aliased = any(tensor.untyped_storage()._cdata in before for tensor in after)
            if written and (len(groups) == 0 or (open_group and len(groups) == 1)):
                raise ValueError(
                    f"stage {number} ({type(stage).__name__}) writes to the model's input, which "
                    "recomputation needs again"
                )
            if groups and (open_group or written or aliased):
                groups[-1].append(stage)
            else:
                groups.append([stage])
            # Only leading stages leave their group open: what they return is the model's input.
            open_group = aliased and len(groups) == 1 and (open_group or len(groups[0]) == 1)
            state = after
    return [group[0] if len(group) == 1 else Joined(group) for group in groups]


def profile(
    model: Any, sample: Tensor | State, *, repeats: int = 3, device: str | None = None
) -> Profile:
    """Measure every stage of `model` on `sample` (a tensor or a tuple of tensors).

    repeats: timed runs per stage, of which the median counts; 0 leaves times at 1 s forward and
    2 s backward.  Stages that are equal in description and bytes share one time, the median of all
    their runs.  The model, its gradients, buffers and the random state are left as they were.
    """
    inputs = sample if isinstance(sample, tuple) else (sample,)
    random = RandomState.now(cuda_devices(inputs))
    try:
        stages = join_stages(stages_of(model), inputs)
        random.restore()
        measured = _bytes(stages, inputs, device or inputs[0].device.type)
        random.restore()
        seconds = _seconds(stages, inputs, repeats) if repeats else [([1.0], [2.0])] * len(stages)
    finally:
        random.restore()
    groups: dict[tuple, tuple[list[float], list[float]]] = {}
    keys = [
        (str(stage) if isinstance(stage, nn.Module) else id(stage), *sorted(sizes.items()))
        for stage, sizes in zip(stages, measured, strict=True)
    ]
    for key, (forward, backward) in zip(keys, seconds, strict=True):
        group = groups.setdefault(key, ([], []))
        group[0].extend(forward)
        group[1].extend(backward)
    # The gradient of a_l is measured where it is made, by the backward of stage l + 1.
    made = [int(sizes.pop("input_gradient_bytes")) for sizes in measured]
    chain = Chain(
        tuple(
            Stage(
                **sizes,
                gradient_bytes=gradient,
                forward_s=statistics.median(groups[key][0]),
                backward_s=max(0.0, statistics.median(groups[key][1])),
                name=type(stage).__name__,
                kind=str(getattr(stage, "kind", "")),
            )
            for stage, sizes, gradient, key in zip(
                stages, measured, [*made[1:], None], keys, strict=True
            )
        ),
        input_bytes=storage_bytes(inputs),
        input_gradient_bytes=made[0],
    )
    return Profile(chain, tuple(stages), tuple(_shared(stages)))


def _shared(stages: Sequence[StageFn]) -> list[nn.Parameter]:
    users: dict[nn.Parameter, int] = {}
    for stage in stages:
        for parameter in set(_parameters(stage)):
            users[parameter] = users.get(parameter, 0) + 1
    return [parameter for parameter, count in users.items() if count > 1]


def _parameters(stage: StageFn) -> list[nn.Parameter]:
    return list(stage.parameters()) if isinstance(stage, nn.Module) else []


def _leaves(state: State, first: bool) -> State:
    """Detached inputs of a differentiable run, as the executor makes them."""
    return tuple(
        t.detach().requires_grad_(
            (t.is_floating_point() or t.is_complex()) and (not first or t.requires_grad)
        )
        for t in state
    )


class _ZeroGradients:
    """While a stage is profiled its parameters have gradients to accumulate into, as in a step
    whose gradients exist already; whatever they had before comes back."""

    def __init__(self, stage: StageFn) -> None:
        self._before = [(p, p.grad) for p in _parameters(stage) if p.requires_grad]

    def __enter__(self) -> None:
        for parameter, _ in self._before:
            parameter.grad = torch.zeros_like(parameter)

    def __exit__(self, *error: object) -> None:
        for parameter, gradient in self._before:
            parameter.grad = gradient


def _differentiable(stage: StageFn, state: State, first: bool) -> tuple[State, State]:
    leaves = _leaves(state, first)
    with torch.enable_grad():
        return leaves, as_state(call_again(stage, leaves), "stage")


def _run_backward(outputs: State, gradients: State) -> None:
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def _bytes(stages: Sequence[StageFn], inputs: State, device: str) -> list[dict[str, int]]:
    """Sizes of every stage, as fields of analysis.checkpointing.Stage plus input_gradient_bytes."""
    rows: list[Callable[[], dict[str, int]]] = []
    with memory_meter(device) as meter:
        state = inputs
        for index, stage in enumerate(stages):
            with _ZeroGradients(stage):
                state, row = _stage_bytes(meter, stage, state, index == 0)
            rows.append(row)
    return [row() for row in rows]  # regions are known once the meter is closed


def _stage_bytes(
    meter: MemoryMeter, stage: StageFn, state: State, first: bool
) -> tuple[State, Callable[[], dict[str, int]]]:
    with meter.region("saving") as saving:
        leaves, outputs = _differentiable(stage, state, first)
    activation = storage_bytes(outputs)
    gradients = tuple(torch.ones_like(output) for output in outputs)
    with meter.region("backward") as backward:
        _run_backward(outputs, gradients)
    input_gradient = storage_bytes([leaf.grad for leaf in leaves])
    del leaves, outputs, gradients
    with torch.no_grad(), meter.region("forward") as forward:
        state = as_state(call_again(stage, state), "stage")

    def row(forward: Region = forward) -> dict[str, int]:
        saved = saving.end_bytes - activation
        return {
            "activation_bytes": activation,
            "saved_bytes": max(0, saved),
            "forward_temporary_bytes": max(0, forward.peak_bytes - activation),
            "saving_temporary_bytes": max(0, saving.peak_bytes - saving.end_bytes),
            "backward_temporary_bytes": backward.peak_bytes - input_gradient,
            "input_gradient_bytes": input_gradient,
        }

    return state, row


def _seconds(
    stages: Sequence[StageFn], inputs: State, repeats: int
) -> list[tuple[list[float], list[float]]]:
    """Per stage, seconds of `repeats` forward runs and of as many backward runs.

    A backward is timed together with the differentiable forward it needs, less a plain forward:
    so forward + backward is what a step without recomputation takes.
    """
    result, state = [], inputs
    for index, stage in enumerate(stages):
        forwards, both = [], []
        with _ZeroGradients(stage):
            for _ in range(repeats + 1):
                _wait(inputs)
                start = time.perf_counter()
                with torch.no_grad():
                    after = as_state(call_again(stage, state), "stage")
                _wait(inputs)
                middle = time.perf_counter()
                gradients = tuple(torch.ones_like(tensor) for tensor in after)
                _wait(inputs)
                again = time.perf_counter()
                _, outputs = _differentiable(stage, state, index == 0)
                _run_backward(outputs, gradients)
                _wait(inputs)
                forwards.append(middle - start)
                both.append(time.perf_counter() - again)
                del outputs, gradients
        forward = statistics.median(forwards[1:])  # the first run warms caches up
        result.append((forwards[1:], [seconds - forward for seconds in both[1:]]))
        state = after
    return result


def _wait(state: State) -> None:
    if any(tensor.is_cuda for tensor in state):
        torch.cuda.synchronize()
