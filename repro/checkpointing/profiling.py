"""Turns a real model into a chain: bytes and seconds of every stage, measured one stage at a time.

Only one activation and one stage's interior are alive at any moment, so a model that would not fit
with everything stored can be profiled all the same.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from analysis.arguments import methods, whole
from analysis.checkpointing import Chain, Stage

from .arguments import check_sample
from .joining import given_to_first, join_stages, stages_of
from .memory import MemoryMeter, Region, memory_meter
from .replay import RandomState, autocast_now, cuda_devices
from .stage_parts import StandIns, parameters_of
from .stage_state import Memory
from .values import Held, StageFn, State, Values, call, storage_bytes


@dataclass(frozen=True)
class Profile:
    """A chain and the callables that its stages are.

    shared are the parameters that more than one stage uses.  unpack: a tuple that a stage returns
    becomes the next one's arguments.  inner: stages (1-based) that call autograd in their forward.
    cast_bytes are weights in the type of autocast, which keeps them until its context ends;
    extra_cast_bytes what running a stage again may add for weights that it shares.
    restored_bytes, per stage, is the state that a second run needs (buffers that change, ...).
    autocast is what was in force: (device, on, type).
    """

    chain: Chain
    stages: tuple[StageFn, ...]
    shared: tuple[nn.Parameter, ...] = field(default=(), repr=False)
    unpack: bool = True
    inner: frozenset[int] = frozenset()
    cast_bytes: int = 0
    extra_cast_bytes: tuple[int, ...] = ()  # a stage each
    restored_bytes: tuple[int, ...] = ()
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()

    def aside_bytes(self, repeated: Collection[int] | None = None) -> int:
        """What a step holds beside its chain if it runs the stages `repeated` (1-based; None: all)
        more than once: the sum of the gradients of shared parameters, weights cast by autocast,
        and the state that stages need to run again."""
        again = range(1, len(self.stages) + 1) if repeated is None else repeated
        shared = sum(p.numel() * p.element_size() for p in self.shared if p.requires_grad)
        state = sum(self.restored_bytes[i - 1] + self.extra_cast_bytes[i - 1] for i in again)
        return shared + self.cast_bytes + state


def profile(
    model: Any,
    sample: Any,
    *,
    repeats: int = 3,
    device: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Measure every stage of `model` on `sample` (a tensor or a tuple of arguments).

    repeats: timed runs per stage, of which the median counts; 0 leaves times at 1 s forward and
    2 s backward.  Stages that are equal in description and bytes share one time, the median of all
    their runs.  The model, its gradients, buffers and the random state are left as they were.
    progress: called with the measurements done and all there are, one or two a stage.

    Measure in the state in which the model trains: mode, autocast, device.
    """
    repeats = whole("repeats", repeats, least=0)
    if progress is not None:
        methods("progress", progress, "__call__")
    check_sample(sample)
    inputs = sample if isinstance(sample, tuple) else (sample,)
    unpack = not isinstance(model, nn.Sequential)
    given = stages_of(model)
    tensors = Values.of(inputs, "the sample").tensors
    random = RandomState.now(cuda_devices(tensors, *(parameters_of(s) for s in given)))
    memory = Memory(given, copied_bytes=math.inf)
    kinds = tuple(sorted({"cpu", *(t.device.type for t in tensors)}))
    try:
        with StandIns(given):
            stages = join_stages(given, inputs, unpack=unpack)
            random.restore()
            count, total = itertools.count(1), (2 if repeats else 1) * len(stages)

            def advance() -> None:
                if progress is not None:
                    progress(next(count), total)

            measured = _bytes(stages, inputs, device or tensors[0].device.type, unpack, advance)
            random.restore()
            seconds = (
                _seconds(stages, inputs, repeats, unpack, advance)
                if repeats
                else [([1.0], [2.0])] * len(stages)
            )
    finally:
        torch.clear_autocast_cache()
        memory.put_back()
        random.restore()
    chain = chain_of(stages, measured, seconds, storage_bytes(tensors))
    shared = tuple(_shared(stages))
    casts = [stage.cast_bytes for stage in measured.stages]
    unique = sum(casts) if measured.cast_bytes is None else measured.cast_bytes
    extra = tuple(casts) if measured.cast_bytes is not None else (0,) * len(casts)
    return Profile(
        chain,
        tuple(stages),
        shared,
        unpack=unpack,
        inner=frozenset(i for i, s in enumerate(measured.stages, start=1) if s.inner),
        cast_bytes=unique,
        extra_cast_bytes=extra,
        restored_bytes=tuple(s.restored_bytes for s in measured.stages),
        autocast=autocast_now(kinds),
    )


def chain_of(
    stages: Sequence[StageFn],
    measured: Measured,
    seconds: Sequence[tuple[list[float], list[float]]],
    input_bytes: int,
) -> Chain:
    """The chain of measured stages; of equal stages all runs together give the time."""
    groups: dict[tuple, tuple[list[float], list[float]]] = {}
    keys = [
        (str(stage) if isinstance(stage, nn.Module) else id(stage), *sorted(found.sizes.items()))
        for stage, found in zip(stages, measured.stages, strict=True)
    ]
    for key, (forward, backward) in zip(keys, seconds, strict=True):
        group = groups.setdefault(key, ([], []))
        group[0].extend(forward)
        group[1].extend(backward)
    # The gradient of a_l is measured where it is made, by the backward of stage l + 1; that of a_L
    # is made by the loss.
    made = [found.input_gradient_bytes for found in measured.stages]
    made.append(measured.stages[-1].output_gradient_bytes)
    return Chain(
        tuple(
            Stage(
                **found.sizes,
                gradient_bytes=gradient,
                forward_s=statistics.median(groups[key][0]),
                backward_s=max(0.0, statistics.median(groups[key][1])),
                name=getattr(stage, "label", type(stage).__name__),
                kind=str(getattr(stage, "kind", "")),
            )
            for stage, found, gradient, key in zip(
                stages, measured.stages, made[1:], keys, strict=True
            )
        ),
        input_bytes=input_bytes,
        input_gradient_bytes=made[0],
    )


def _shared(stages: Sequence[StageFn]) -> list[nn.Parameter]:
    users: dict[nn.Parameter, int] = {}
    for stage in stages:
        for parameter in parameters_of(stage):
            users[parameter] = users.get(parameter, 0) + 1
    return [parameter for parameter, count in users.items() if count > 1]


class ZeroGradients:
    """While a stage is profiled its parameters have gradients to accumulate into, as in a step
    whose gradients exist already."""

    def __init__(self, stage: StageFn) -> None:
        self._parameters = [p for p in parameters_of(stage) if p.requires_grad]

    def __enter__(self) -> None:
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def __exit__(self, *error: object) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _differentiable(stage: StageFn, held: Held, unpack: bool) -> tuple[State, State]:
    """Inputs as leaves, and outputs with their graph."""
    value = held.again("the input")
    with torch.enable_grad():
        result = call(stage, value, unpack)
    return Values.of(value, "the input").tensors, Values.of(result, "stage").tensors


def _lean(stage: StageFn, held: Held, unpack: bool, *, hold: bool) -> Held:
    """A run that keeps nothing, as the executor does it."""
    value = held.again("the input")
    hooks = saved_tensors_hooks(lambda t: t.detach() if hold else None, lambda t: t)
    with torch.enable_grad(), hooks:
        return Held(Values.of(call(stage, value, unpack), "stage"))


def _differentiates(stage: StageFn, held: Held, unpack: bool) -> bool:
    """Whether a stage calls autograd in its own forward."""
    used: list[bool] = []

    def unpacked(tensor: Tensor) -> Tensor:
        used.append(True)
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(lambda t: t.detach(), unpacked):
        call(stage, held.again("the input"), unpack)
    return bool(used)


def _run_backward(outputs: State, gradients: State) -> None:
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


@dataclass(frozen=True)
class Found:
    """One stage: sizes are fields of analysis.checkpointing.Stage; gradients are of what has one,
    so that results such as masks and indices add nothing."""

    sizes: dict[str, int]
    input_gradient_bytes: int
    output_gradient_bytes: int
    restored_bytes: int
    cast_bytes: int
    inner: bool


@dataclass(frozen=True)
class Measured:
    """cast_bytes of all stages together, where weights are shared; None: their sum."""

    stages: list[Found]
    cast_bytes: int | None


def _bytes(
    stages: Sequence[StageFn],
    inputs: tuple[Any, ...],
    device: str,
    unpack: bool,
    advance: Callable[[], None],
) -> Measured:
    casting = any(on for _, on, _ in autocast_now(("cpu", device)))
    rows: list[Callable[[], Found]] = []
    together: Region | None = None
    with memory_meter(device) as meter:
        start = Held(Values.of(given_to_first(inputs, unpack), "the sample"))
        if casting and _shared(stages):
            torch.clear_autocast_cache()
            held = start
            with meter.region("casts of all stages") as together:
                for stage in stages:
                    held = _lean(stage, held, unpack, hold=True)
                del held
        held = start
        for stage in stages:
            with ZeroGradients(stage):
                held, row = stage_bytes(meter, stage, held, unpack, casting)
            rows.append(row)
            advance()
    # regions are known once the meter is closed
    return Measured([row() for row in rows], together.end_bytes if together else None)


def stage_bytes(
    meter: MemoryMeter, stage: StageFn, held: Held, unpack: bool, casting: bool
) -> tuple[Held, Callable[[], Found]]:
    """A stage's result, and its sizes once the meter is closed."""
    inner = _differentiates(stage, held, unpack)
    cold: Region | None = None
    if casting:
        torch.clear_autocast_cache()
        with meter.region("casts") as cold:
            _lean(stage, held, unpack, hold=inner)
    with meter.region("saving") as saving:
        leaves, outputs = _differentiable(stage, held, unpack)
    activation = storage_bytes(outputs)
    gradients = tuple(torch.ones_like(output) for output in outputs)
    output_gradient = storage_bytes(
        [gradient for o, gradient in zip(outputs, gradients, strict=True) if o.requires_grad]
    )
    with meter.region("backward") as backward:
        _run_backward(outputs, gradients)
    input_gradient = storage_bytes([leaf.grad for leaf in leaves])
    del leaves, outputs, gradients
    with meter.region("forward") as forward:
        memory = Memory(stage)
        held = _lean(stage, held, unpack, hold=inner)
        restored = memory.settle(f"stage {type(stage).__name__}", strict=False)
        del memory

    def row(forward: Region = forward) -> Found:
        saved = saving.end_bytes - activation
        return Found(
            {
                "activation_bytes": activation,
                "saved_bytes": max(0, saved),
                "forward_temporary_bytes": max(0, forward.peak_bytes - activation),
                "saving_temporary_bytes": max(0, saving.peak_bytes - saving.end_bytes),
                "backward_temporary_bytes": backward.peak_bytes - input_gradient,
            },
            input_gradient,
            output_gradient,
            restored,
            max(0, cold.end_bytes) if cold is not None else 0,
            inner,
        )

    return held, row


def _seconds(
    stages: Sequence[StageFn],
    inputs: tuple[Any, ...],
    repeats: int,
    unpack: bool,
    advance: Callable[[], None],
) -> list[tuple[list[float], list[float]]]:
    """Per stage, seconds of `repeats` forward runs and of as many backward runs.

    A backward is timed together with the differentiable forward it needs, less a plain forward:
    so forward + backward is what a step without recomputation takes.
    """
    result, held = [], Held(Values.of(given_to_first(inputs, unpack), "the sample"))
    for stage in stages:
        found, held = stage_seconds(stage, held, unpack, repeats)
        result.append(found)
        advance()
    return result


def stage_seconds(
    stage: StageFn, held: Held, unpack: bool, repeats: int
) -> tuple[tuple[list[float], list[float]], Held]:
    """Seconds of one stage's runs, forward and backward, and its result."""
    forwards, both = [], []
    inner = _differentiates(stage, held, unpack)
    with ZeroGradients(stage):
        for _ in range(repeats + 1):
            _wait(held)
            start = time.perf_counter()
            after = _lean(stage, held, unpack, hold=inner)
            _wait(held)
            middle = time.perf_counter()
            gradients = tuple(torch.ones_like(tensor) for tensor in after.tensors)
            _wait(held)
            again = time.perf_counter()
            _, outputs = _differentiable(stage, held, unpack)
            _run_backward(outputs, gradients)
            _wait(held)
            forwards.append(middle - start)
            both.append(time.perf_counter() - again)
            del outputs, gradients
    forward = statistics.median(forwards[1:])  # the first run warms caches up
    return (forwards[1:], [seconds - forward for seconds in both[1:]]), after


def _wait(held: Held) -> None:
    if any(tensor.is_cuda for tensor in held.tensors):
        torch.cuda.synchronize()
