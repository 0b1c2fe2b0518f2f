"""Executes any schedule on real stages: the actions of analysis.checkpointing.schedule, literally.

Gradients are bitwise those of the plain model: every repeated run sees the same random numbers,
autocast settings and buffers, and gradients of a parameter are summed in the order in which
autograd would.  (Exceptions, shared with every checkpointing by segments: a parameter used several
times inside one stage and again in another; a shared parameter under autocast, which is cast once
per run.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from analysis.checkpointing.schedule import Action, Keep, Op, Schedule, Value

from .replay import (
    RandomState,
    StageFn,
    State,
    Surroundings,
    as_state,
    call_again,
    cuda_devices,
)
from .swap import HostCopy, Watched

Gradients = tuple[Tensor | None, ...]


@dataclass
class Kept:
    """A stage ready for backward: its detached inputs, its outputs with their graph, and, in
    schedules that move stages, the storages that it made."""

    inputs: State
    outputs: State
    storages: list[torch.UntypedStorage]


class Run:
    """One training step of a schedule.  `forward` performs the actions before the loss, `backward`
    the others.  `forwards[l]` counts runs of stage l (1-based)."""

    def __init__(
        self, stages: Sequence[StageFn], schedule: Schedule, *, preserve_rng_state: bool = True
    ) -> None:
        self.stages, self.schedule = stages, schedule
        self.preserve_rng_state = preserve_rng_state
        self.forwards = [0] * (len(stages) + 1)
        self.checkpoints: dict[int, State] = {}
        self.kept: dict[int, Kept] = {}
        self.gradients: dict[int, Gradients] = {}
        self.host: dict[tuple[Value, int], HostCopy] = {}
        self.random: dict[int, RandomState] = {}
        self.moved = {a.stage for a in schedule if a.op is Op.OFFLOAD and a.value is Value.STAGE}
        self._next = 0
        self._surroundings: Surroundings | None = None
        self._devices: tuple[int, ...] = ()
        self._generators: RandomState | None = None
        self._actions: dict[Op, Callable[[Action], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.DROP: self._drop,
            Op.OFFLOAD: self._offload,
            Op.FETCH: self._fetch,
        }

    def forward(self, inputs: State) -> State:
        """a_0 -> a_L, up to the loss."""
        self._surroundings = Surroundings(inputs)
        self._devices = cuda_devices(inputs)
        self.checkpoints[0] = inputs
        del inputs
        while (action := self.schedule[self._next]).op is not Op.LOSS:
            self._actions[action.op](action)
            self._next += 1
        self._next += 1
        outputs = self._activation(len(self.stages))
        self.checkpoints.pop(len(self.stages), None)
        return outputs

    def backward(self, gradients: Gradients) -> Gradients:
        """The gradient of a_L -> the gradient of a_0.  Parameters accumulate into .grad."""
        if self._next >= len(self.schedule):
            raise RuntimeError(
                "backward a second time: what the schedule kept has been freed; "
                "run the forward pass again"
            )
        self.gradients[len(self.stages)] = gradients
        del gradients
        for action in self.schedule[self._next :]:
            self._actions[action.op](action)
        self._next = len(self.schedule)
        return self.gradients.pop(0)

    def _activation(self, index: int) -> State:
        if index in self.kept:
            return tuple(tensor.detach() for tensor in self.kept[index].outputs)
        return self.checkpoints[index]

    def _forward(self, action: Action) -> None:
        index = action.stage
        state = self._activation(index - 1)
        if action.keep is not Keep.ALL:
            with torch.no_grad():
                self.checkpoints[index] = self._run(index, state)
            if action.keep is Keep.NOTHING:
                del self.checkpoints[index - 1]
            return
        leaves = tuple(self._leaf(tensor, index - 1) for tensor in state)
        del state
        storages: list[torch.UntypedStorage] = []
        with torch.enable_grad():
            if index in self.moved:
                with Watched() as watched:
                    outputs = self._run(index, leaves)
                storages = watched.storages(outputs)
            else:
                outputs = self._run(index, leaves)
        self.kept[index] = Kept(leaves, outputs, storages)

    def _leaf(self, tensor: Tensor, index: int) -> Tensor:
        wanted = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(wanted and (index > 0 or tensor.requires_grad))

    def _run(self, index: int, state: State) -> State:
        """Stage `index`, the first time or again, in the surroundings of the forward pass."""
        stage, name = self.stages[index - 1], f"stage {index}"
        assert self._surroundings is not None
        first = self.forwards[index] == 0
        self.forwards[index] += 1
        with self._surroundings.again():
            if first:
                if not self.preserve_rng_state:
                    return as_state(stage(*state), name)
                # Between two stages nobody draws, so one look at the generators a stage is enough.
                before = self._generators or RandomState.now(self._devices)
                result = as_state(stage(*state), name)
                self._generators = RandomState.now(self._devices)
                if self._generators != before:
                    self.random[index] = before
                return result
            if index not in self.random:
                return as_state(call_again(stage, state), name)
            outside = RandomState.now(self._devices)
            self.random[index].restore()
            try:
                return as_state(call_again(stage, state), name)
            finally:
                outside.restore()

    def _backward(self, action: Action) -> None:
        index = action.stage
        kept, gradients = self.kept.pop(index), self.gradients.pop(index)
        pairs = [
            (output, gradient)
            for output, gradient in zip(kept.outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        self.gradients[index - 1] = tuple(leaf.grad for leaf in kept.inputs)
        self.checkpoints.pop(index - 1, None)

    def _drop(self, action: Action) -> None:
        if action.value is Value.ACTIVATION:
            del self.checkpoints[action.stage]
        else:
            del self.kept[action.stage]

    def _storages(self, value: Value, index: int) -> list[torch.UntypedStorage]:
        if value is Value.STAGE:
            return self.kept[index].storages
        return list({t.untyped_storage()._cdata: t.untyped_storage()
                     for t in self.checkpoints[index]}.values())  # fmt: skip

    def _offload(self, action: Action) -> None:
        assert action.value is not None
        storages = self._storages(action.value, action.stage)
        self.host[action.value, action.stage] = HostCopy(storages)

    def _fetch(self, action: Action) -> None:
        assert action.value is not None
        self.host.pop((action.value, action.stage)).bring_back()
        if action.value is Value.STAGE:  # else they would outlive their use in the backward
            self.kept[action.stage].storages = []


class PlannedFunction(torch.autograd.Function):
    """A run as one node of the surrounding graph.  `anchor` requires a gradient, so that the node
    exists even where no input does; `shared` are parameters that several stages use."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        run: Run,
        shared: list[nn.Parameter],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> State:
        ctx.run, ctx.shared = run, shared  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        outputs = run.forward(inputs)
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor | None) -> tuple:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "a planned model accumulates into .grad as it recomputes: use .backward() without "
                "`inputs`, not torch.autograd.grad()"
            )
        run: Run = ctx.run  # type: ignore[attr-defined]
        shared: list[nn.Parameter] = ctx.shared  # type: ignore[attr-defined]
        # Autograd adds up all contributions before it touches an existing .grad; here they arrive
        # one by one, so an existing .grad waits aside to get their sum.
        waiting = [(p, p.grad) for p in shared if p.grad is not None]
        for parameter, _ in waiting:
            parameter.grad = None
        result = run.backward(gradients)
        with torch.no_grad():
            for parameter, before in waiting:
                assert before is not None
                if parameter.grad is not None:
                    before += parameter.grad
                parameter.grad = before
        return (None, None, None, *result)
