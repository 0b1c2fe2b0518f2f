"""Turns a real model into a chain: bytes and seconds of every stage, measured one stage at a time.

Only one activation and one stage's interior are alive at any moment, so a model that would not fit
with everything stored can be profiled all the same.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from analysis.arguments import methods, whole
from analysis.checkpointing import Chain, InfeasibleBudgetError, Plan, Replay, Schedule, Stage, simulate, store_all
from analysis.checkpointing.schedule import Op

from .arguments import check_sample
from .fingerprint import Prints
from .joining import given_to_first, join_stages, stages_of
from .kept import Kept, left_behind
from .memory import MemoryMeter, Region, memory_meter
from .replay import autocast_now, cuda_devices
from .saved import INNER_HOOKS
from .stage_parts import parameters_of
from .state import ModuleState, left_alone
from .values import Held, StageFn, State, Values, call, stage_name, storage_bytes


@dataclass(frozen=True)
class Profile:
    """A chain and the callables that its stages are.

    shared are the parameters that more than one stage uses.  unpack: a tuple that a stage returns
    becomes the next one's arguments.  inner: stages (1-based) that call autograd in their forward.
    cast_bytes are weights in the type of autocast, which keeps them until its context ends;
    extra_cast_bytes what running a stage again may add for weights that it shares.
    restored_bytes, per stage, is the state that a second run needs (buffers that change, ...);
    kept what a stage leaves behind when it has run.  autocast is what was in force: (device, on,
    type).
    """

    chain: Chain
    stages: tuple[StageFn, ...]
    shared: tuple[nn.Parameter, ...] = field(default=(), repr=False)
    unpack: bool = True
    inner: frozenset[int] = frozenset()
    cast_bytes: int = 0
    extra_cast_bytes: tuple[int, ...] = ()  # a stage each
    restored_bytes: tuple[int, ...] = ()
    kept: tuple[Kept, ...] = ()  # a stage each
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()

    def aside_bytes(self) -> int:
        """The most that a step holds beside its chain: the sum of the gradients of shared parameters,
        weights cast by autocast, the state that stages need to run again, and what they keep."""
        again = range(1, len(self.stages) + 1)
        kept = sum(k.kept_bytes + 2 * k.graph_bytes for k in self.kept)
        return self._shared_bytes() + self._cast_bytes(again) + sum(self.restored_bytes) + kept

    def peak_bytes(self, schedule: Schedule, replay: Replay | None = None) -> int:
        """The peak of a schedule and of what lies beside the chain.

        What a stage keeps is in the chain too where it runs once, until its backward is over.
        """
        replay = replay or simulate(self.chain, schedule)
        runs = Counter(action.stage for action in schedule if action.op is Op.FORWARD)
        again = {stage for stage, count in runs.items() if count > 1}
        begun: set[int] = set()
        peak = beside = 0
        for action, live in zip(schedule, replay.live_bytes, strict=True):
            stage = action.stage
            if action.op is Op.FORWARD and stage not in begun:
                begun.add(stage)
                beside += self._beside(stage, stage in again)
                peak = max(peak, live + beside)
            elif action.op is Op.FORWARD:
                peak = max(peak, live + beside + self.kept[stage - 1].graph_bytes)  # another graph
            else:
                peak = max(peak, live + beside)
            if action.op is Op.BACKWARD:
                beside -= self._beside(stage, stage in again)
        kept = sum(k.kept_bytes for k in self.kept)
        return peak + self._shared_bytes() + self._cast_bytes(again) + kept

    def _beside(self, stage: int, again: bool) -> int:
        """What lies beside the chain from a stage's first run until its backward is over.  What
        others hold of it is in the chain too where it runs once."""
        kept = self.kept[stage - 1]
        return kept.graph_bytes + (self.restored_bytes[stage - 1] if again else -kept.overlap_bytes)

    def _shared_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.shared if p.requires_grad)

    def _cast_bytes(self, again: Collection[int]) -> int:
        return self.cast_bytes + sum(self.extra_cast_bytes[i - 1] for i in again)

    @property
    def steady_steps(self) -> int:
        """After so many steps one finds from its start what earlier ones have left behind."""
        return 1 + max((k.runs for k in self.kept if k.kept_bytes), default=0)

    def plan_within(self, plan: Callable[[int], Plan], budget_bytes: int) -> Plan:
        """The plan that a planner makes for what a budget leaves to the chain.

        InfeasibleBudgetError names the least budget that would do.
        """
        everything = store_all(self.chain)
        stored = self.peak_bytes(everything.schedule)
        if stored <= budget_bytes:
            return plan(everything.peak_bytes)
        aside = self.aside_bytes()
        try:
            return plan(max(0, budget_bytes - aside))
        except InfeasibleBudgetError as error:
            least = min(stored, error.smallest_budget_bytes + aside)
            raise InfeasibleBudgetError(budget_bytes, least) from None

    def refuse_changes(self, repeated: Collection[int], way_out: str) -> None:
        """ValueError for a stage among `repeated` that changes what nobody puts back."""
        for stage in sorted(repeated):
            if changes := self.kept[stage - 1].changes:
                raise ValueError(
                    f"stage {stage} ({stage_name(self.stages[stage - 1])}) changes "
                    f"{', '.join(changes)} each time that it runs, and this plan runs it more than "
                    "once, which would change it again: keep it in buffers or attributes of the "
                    f"stage's modules, change it outside of the stage, or choose {way_out}"
                )


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
    devices = cuda_devices(tensors, *(parameters_of(s) for s in given))
    kinds = tuple(sorted({"cpu", *(t.device.type for t in tensors)}))
    try:
        with left_alone(given, devices) as random:
            stages = join_stages(given, inputs, unpack=unpack)
            random.restore()
            count, total = itertools.count(1), (2 if repeats else 1) * len(stages)

            def advance() -> None:
                if progress is not None:
                    progress(next(count), total)

            measured = _bytes(stages, inputs, device or tensors[0].device.type, unpack, advance)
            random.restore()
            seconds = _seconds(stages, inputs, repeats, unpack, advance) if repeats else [([1.0], [2.0])] * len(stages)
    finally:
        torch.clear_autocast_cache()
    found = measured.stages
    casts = tuple(stage.cast_bytes for stage in found)
    return Profile(
        chain_of(stages, found, seconds, storage_bytes(tensors)),
        tuple(stages),
        tuple(_shared(stages)),
        unpack=unpack,
        inner=frozenset(i for i, s in enumerate(found, start=1) if s.inner),
        cast_bytes=sum(casts) if measured.cast_bytes is None else measured.cast_bytes,
        extra_cast_bytes=(0,) * len(casts) if measured.cast_bytes is None else casts,
        restored_bytes=tuple(s.restored_bytes for s in found),
        kept=tuple(s.kept for s in found),
        autocast=autocast_now(kinds),
    )


def chain_of(
    stages: Sequence[StageFn],
    measured: Sequence[Found],
    seconds: Sequence[tuple[list[float], list[float]]],
    input_bytes: int,
) -> Chain:
    """The chain of measured stages; of equal stages all runs together give the time."""
    groups: dict[tuple, tuple[list[float], list[float]]] = {}
    keys = [
        (str(stage) if isinstance(stage, nn.Module) else id(stage), *sorted(found.sizes.items()))
        for stage, found in zip(stages, measured, strict=True)
    ]
    for key, (forward, backward) in zip(keys, seconds, strict=True):
        group = groups.setdefault(key, ([], []))
        group[0].extend(forward)
        group[1].extend(backward)
    # The gradient of a_l is measured where it is made, by the backward of stage l + 1; that of a_L
    # is made by the loss.
    made = [found.input_gradient_bytes for found in measured]
    made.append(measured[-1].output_gradient_bytes)
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
            for stage, found, gradient, key in zip(stages, measured, made[1:], keys, strict=True)
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


class _ZeroGradients:
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


def _lean(stage: StageFn, held: Held, unpack: bool, *, hold: bool, compared: bool = False) -> Held:
    """A run that keeps nothing, as the executor does it.  compared: with the fingerprints of it
    all, whose temporaries count where they are made on a device."""
    value = held.again("the input")
    prints = Prints(Values.of(value, "the input").tensors) if compared else None

    def pack(tensor: Tensor) -> Tensor | None:
        if prints is not None:
            prints.add([tensor])
        return tensor.detach() if hold else None

    with torch.enable_grad(), INNER_HOOKS.without_graph(), saved_tensors_hooks(pack, lambda kept: kept):
        result = Values.of(call(stage, value, unpack), "stage")
    if prints is not None:
        prints.results(result.tensors)
    return Held(result)


def _differentiates(stage: StageFn, held: Held, unpack: bool) -> bool:
    """Whether a stage calls autograd in its own forward."""
    used: list[bool] = []

    def unpacked(tensor: Tensor) -> Tensor:
        used.append(True)
        return tensor

    with torch.enable_grad(), INNER_HOOKS.without_graph(), saved_tensors_hooks(lambda t: t.detach(), unpacked):
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
    kept: Kept


@dataclass(frozen=True)
class Measured:
    """cast_bytes of all stages together, where weights are shared; None: their sum."""

    stages: list[Found]
    cast_bytes: int | None


def _bytes(
    stages: Sequence[StageFn], inputs: tuple[Any, ...], device: str, unpack: bool, advance: Callable[[], None]
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
            with _ZeroGradients(stage):
                held, row = _stage_bytes(meter, stage, held, unpack, casting)
            rows.append(row)
            advance()
    # regions are known once the meter is closed
    return Measured([row() for row in rows], together.end_bytes if together else None)


def _stage_bytes(
    meter: MemoryMeter, stage: StageFn, held: Held, unpack: bool, casting: bool
) -> tuple[Held, Callable[[], Found]]:
    """A stage's result, and its sizes once the meter is closed."""
    inner = _differentiates(stage, held, unpack)
    kept = left_behind(stage, held, unpack, hold=inner)
    cold: Region | None = None
    if casting:
        torch.clear_autocast_cache()
        with meter.region("casts") as cold:
            _lean(stage, held, unpack, hold=inner)
    with meter.region("both ways") as both:
        with meter.region("saving") as saving:
            leaves, outputs = _differentiable(stage, held, unpack)
        # A result that is the input is there already.
        activation = storage_bytes([*outputs, *held.tensors]) - storage_bytes(held.tensors)
        gradients = tuple(torch.ones_like(output) for output in outputs)
        output_gradient = storage_bytes(
            [gradient for o, gradient in zip(outputs, gradients, strict=True) if o.requires_grad]
        )
        with meter.region("backward") as backward:
            _run_backward(outputs, gradients)
        input_gradients = [leaf.grad for leaf in leaves]
        input_gradient = storage_bytes(input_gradients)
        for leaf in leaves:
            leaf.grad = None  # a graph that somebody keeps would hold it
        del leaves, outputs, gradients, input_gradients
    with meter.region("forward") as forward:
        state = ModuleState(stage)
        held = _lean(stage, held, unpack, hold=inner, compared=True)
        restored = state.settle(f"stage {type(stage).__name__}", strict=False)
        del state

    def row() -> Found:
        # An earlier run's tensors went when this one's took their place; what only piled up did not
        saved = saving.end_bytes - activation - both.end_bytes
        saved += kept.overlap_bytes - kept.graph_bytes
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
            kept,
        )

    return held, row


def _seconds(
    stages: Sequence[StageFn], inputs: tuple[Any, ...], repeats: int, unpack: bool, advance: Callable[[], None]
) -> list[tuple[list[float], list[float]]]:
    """Per stage, seconds of `repeats` forward runs and of as many backward runs.

    A backward is timed together with the differentiable forward it needs, less a plain forward:
    so forward + backward is what a step without recomputation takes.
    """
    result, held = [], Held(Values.of(given_to_first(inputs, unpack), "the sample"))
    for stage in stages:
        found, held = _stage_seconds(stage, held, unpack, repeats)
        result.append(found)
        advance()
    return result


def _stage_seconds(
    stage: StageFn, held: Held, unpack: bool, repeats: int
) -> tuple[tuple[list[float], list[float]], Held]:
    """Seconds of one stage's runs, forward and backward, and its result."""
    forwards, both = [], []
    inner = _differentiates(stage, held, unpack)
    with _ZeroGradients(stage):
        for _ in range(repeats + 1):
            with _clock(held) as alone:
                after = _lean(stage, held, unpack, hold=inner)
            gradients = tuple(torch.ones_like(tensor) for tensor in after.tensors)
            with _clock(held) as pair:
                _, outputs = _differentiable(stage, held, unpack)
                _run_backward(outputs, gradients)
            forwards.append(alone[0])
            both.append(pair[0])
            del outputs, gradients
    forward = statistics.median(forwards[1:])  # the first run warms caches up
    return (forwards[1:], [seconds - forward for seconds in both[1:]]), after


@contextmanager
def _clock(held: Held) -> Iterator[list[float]]:
    """Seconds between, once what a device was given is done."""
    _wait(held)
    begin, found = time.perf_counter(), [0.0]
    yield found
    _wait(held)
    found[0] = time.perf_counter() - begin


def _wait(held: Held) -> None:
    if any(tensor.is_cuda for tensor in held.tensors):
        torch.cuda.synchronize()
