"""Executes any schedule on real stages: the actions of analysis.checkpointing.schedule, literally.

The forward pass builds the graph that the plain model builds.  A stage that the plan keeps is run
as it is; of another one the graph keeps no tensors, only places for them (saved.py).  Before the
backward of stage l begins, a hook on its result performs the schedule's actions up to "backward l",
which fill those places.  So gradients are summed by autograd itself, in the plain model's order,
and are bitwise equal, those of weights that several stages share included; hooks, retain_graph,
torch.autograd.grad, second derivatives, DistributedDataParallel and FSDP2 see an ordinary graph.

A repeated run starts as the first one did and must give the same bits (repeat.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from analysis.checkpointing.schedule import Action, Keep, Op, Schedule, Value

from .repeat import Around, Repeat
from .replay import Surroundings, cuda_devices
from .saved import INNER_HOOKS, Pack, Saved
from .stage_parts import parameters_of
from .swap import HostCopy, Watched
from .values import Held, StageFn, Values, call, stage_name


class Program:
    """Stages and a schedule, and what follows from them once for all steps.

    unpack: does a stage that returned a tuple hand its items to the next one as arguments?
    inner: stages that call autograd inside their forward, so that what they save must outlive it
    """

    def __init__(
        self,
        stages: Sequence[StageFn],
        schedule: Schedule,
        *,
        unpack: bool = True,
        inner: frozenset[int] = frozenset(),
        preserve_rng_state: bool = True,
        check_recompute: bool = True,
    ) -> None:
        self.stages, self.schedule, self.unpack, self.inner = stages, schedule, unpack, inner
        self.preserve_rng_state, self.check_recompute = preserve_rng_state, check_recompute
        runs = [0] * (len(stages) + 1)
        first: dict[int, Keep] = {}
        for action in schedule:
            if action.op is Op.FORWARD:
                runs[action.stage] += 1
                assert action.keep is not None
                first.setdefault(action.stage, action.keep)
        moved = {a.stage for a in schedule if a.op is Op.OFFLOAD and a.value is Value.STAGE}
        dropped = {a.stage for a in schedule if a.op is Op.DROP and a.value is Value.STAGE}
        self.moved = moved
        self.repeated = {stage for stage, count in enumerate(runs) if count > 1}
        kept = {stage for stage, keep in first.items() if keep is Keep.ALL}
        self.plain = kept - moved - dropped - self.repeated  # these leave the graph as it is
        weights = [p for stage in stages for p in parameters_of(stage)]
        self.kinds = tuple(sorted({"cpu", *(p.device.type for p in weights)}))
        self.devices = cuda_devices(weights)
        self._labels = [f"{n} ({stage_name(stage)})" for n, stage in enumerate(stages, start=1)]

    def label(self, stage: int) -> str:
        return self._labels[stage - 1]


class Counts:
    """`forwards[l]` counts runs of stage l (1-based) in one step."""

    def __init__(self, stages: int) -> None:
        self.forwards = [0] * (stages + 1)


class Run:
    """One training step of a schedule: `forward` performs the actions before the loss, the graph
    that it returns calls for the others."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.counts = Counts(len(program.stages))
        self._next = 0
        self._passed = len(program.stages) + 1  # the last stage whose backward is over
        self._active = 0  # the stage that is being run for the first time
        self._lock = threading.RLock()  # several devices' threads may go backward
        self._checkpoints: dict[int, Held] = {}
        self._kept: dict[int, Held] = {}
        self._repeats: dict[int, Repeat] = {}
        self._storages: dict[int, list[torch.UntypedStorage]] = {}
        self._host: dict[tuple[Value, int], HostCopy] = {}
        self._gradients: tuple[int, list[Tensor]] = (0, [])
        self._graph_task = -1
        self._provided = (0, -1)  # the stage that was provided for last, in which backward
        self._around: Around

    # -- the forward pass -------------------------------------------------------------------------

    def forward(self, inputs: tuple[Any, ...]) -> Any:
        """a_0 -> a_L, up to the loss."""
        program = self.program
        given = Values.of(inputs, "the model's input")
        kinds = {*program.kinds, *(t.device.type for t in given.tensors)}
        self._around = Around(
            Surroundings(tuple(sorted(kinds))),
            tuple(sorted({*program.devices, *cuda_devices(given.tensors)})),
            program.preserve_rng_state,
            program.check_recompute,
        )
        self._checkpoints[0] = Held(given)
        foreign = {id(tensor) for tensor in given.tensors}
        if not program.unpack and len(inputs) == 1:
            inputs = inputs[0]
            self._checkpoints[0] = Held(Values.of(inputs, "the model's input"))
        del given
        value: Any = inputs
        del inputs
        while (action := program.schedule[self._next]).op is not Op.LOSS:
            first = action.op is Op.FORWARD and self.counts.forwards[action.stage] == 0
            if first:
                value = self._first(action, value, foreign)
            else:
                self._perform(action)
            self._next += 1
        self._next += 1
        self._checkpoints.pop(len(program.stages), None)
        return value

    def _first(self, action: Action, value: Any, foreign: set[int]) -> Any:
        """The first run of a stage, whose graph is the one that is differentiated."""
        stage, program = action.stage, self.program
        name = f"stage {program.label(stage)}"
        self.counts.forwards[stage] += 1
        given = Values.of(value, name).tensors
        self._active = stage
        watched = Watched() if stage in program.moved else nullcontext()
        hooks = self._hooks(stage, given, action.keep is Keep.ALL)
        with INNER_HOOKS.without_graph(), hooks as ran, watched:
            del given
            value = call(program.stages[stage - 1], value, program.unpack)
        self._active = 0
        result = Values.of(value, name)
        if ran is not None:
            ran(result.tensors)
        if isinstance(watched, Watched):
            saved = [s.tensor for ref in self._repeats[stage].places if (s := ref()) is not None]
            self._storages[stage] = watched.made([*saved, *result.tensors])
        elif stage in program.inner and action.keep is not Keep.ALL:
            self._repeats[stage].empty()
        self._keep(action, Held(result))
        for tensor in result.tensors:
            if tensor.grad_fn is not None and id(tensor) not in foreign:
                tensor.register_hook(lambda gradient, stage=stage: self._arrived(stage, gradient))
        return value

    def _hooks(self, stage: int, given: tuple[Tensor, ...], keep: bool) -> AbstractContextManager[Any]:
        """Places instead of tensors for a first run, unless its graph stays as it is."""
        program = self.program
        name, hold = f"stage {program.label(stage)}", stage in program.inner
        repeat = Repeat(program.stages[stage - 1], name, self._around, hold=hold)
        self._repeats[stage] = repeat
        if stage in program.repeated:
            return repeat.first(self, stage, given, keep=keep)
        self._around.generators = None
        if stage in program.plain:
            return nullcontext()
        pack = Pack(self, stage, repeat.places, hold=keep or hold, prints=None)
        return saved_tensors_hooks(pack, Saved.unpack)

    # -- actions ----------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        if action.op is Op.FORWARD:
            self._again(action)
        elif action.op is Op.BACKWARD:  # its nodes have run, or will run when they are ready
            self._kept.pop(action.stage, None)
            self._checkpoints.pop(action.stage - 1, None)
            self._repeats.pop(action.stage, None)
            self._passed = action.stage
        elif action.op is Op.DROP:
            if action.value is Value.ACTIVATION:
                del self._checkpoints[action.stage]
            else:
                del self._kept[action.stage]
                self._repeats[action.stage].empty()
        elif action.op is Op.OFFLOAD:
            assert action.value is not None
            storages = self._of(action.value, action.stage)
            self._host[action.value, action.stage] = HostCopy(storages)
        elif action.op is Op.FETCH:
            assert action.value is not None
            self._host.pop((action.value, action.stage)).bring_back()
            self._storages.pop(action.stage, None)  # they would outlive their use in the backward

    def _keep(self, action: Action, result: Held) -> None:
        stage = action.stage
        if action.keep is Keep.ALL:
            self._kept[stage] = result
            return
        self._checkpoints[stage] = result
        if action.keep is Keep.NOTHING:
            del self._checkpoints[stage - 1]

    def _again(self, action: Action) -> None:
        """Run a stage once more, from a detached input; its graph is thrown away."""
        stage, program = action.stage, self.program
        name = f"stage {program.label(stage)}"
        before = self._kept.get(stage - 1) or self._checkpoints[stage - 1]
        origin = f"the result of stage {program.label(stage - 1)}" if stage > 1 else "the input"
        value = before.again(origin)
        self.counts.forwards[stage] += 1
        inputs = Values.of(value, origin).tensors
        with self._repeats[stage].again(inputs, fill=action.keep is Keep.ALL) as ran:
            del inputs
            value = call(program.stages[stage - 1], value, program.unpack)
        result = Values.of(value, name)
        ran(result.tensors)
        self._keep(action, Held(result))

    def _of(self, value: Value, stage: int) -> list[torch.UntypedStorage]:
        if value is Value.STAGE:
            return self._storages[stage]
        return list(
            {t.untyped_storage()._cdata: t.untyped_storage() for t in self._checkpoints[stage].tensors}.values()
        )

    # -- what the graph asks for in the backward pass ---------------------------------------------

    def _arrived(self, stage: int, gradient: Tensor) -> None:
        """The gradient of a_stage is there: everything up to "backward stage" is due.

        It is held while the stage's backward runs, as the simulator counts it.
        """
        if self._gradients[0] != stage:
            self._gradients = stage, []
        # Its own graph (create_graph) would lead back to this run; vmap has no rule for detach.
        self._gradients[1].append(gradient.detach() if gradient.requires_grad else gradient)
        self.provide(stage)

    def provide(self, stage: int) -> None:
        """Perform all actions before "backward stage"; a second backward finds them done."""
        if self._active:
            return
        now = stage, torch._C._current_graph_task_id()
        if now == self._provided:  # most of a stage's saved tensors ask right after another
            return
        with self._lock:
            self._finish_with_the_backward()
            while self._passed > stage and self._next < len(self.program.schedule):
                action = self.program.schedule[self._next]
                if action.op is Op.BACKWARD and action.stage == stage:
                    break
                self._perform(action)
                self._next += 1
            self._provided = now

    def label(self, stage: int) -> str:
        return self.program.label(stage)

    def refuse(self, stage: int) -> None:
        """RuntimeError for a saved tensor that is not there."""
        name = f"stage {self.program.label(stage)}"
        if self._active == stage:
            raise RuntimeError(
                f"{name} calls autograd inside its own forward, which it did not do when it was "
                "profiled: plan it in the state in which it trains"
            )
        raise RuntimeError(f"{name} saved nothing for its backward when it ran again")

    def _finish_with_the_backward(self) -> None:
        """Once a backward pass, ask for `_end` to be called at its end."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._graph_task):
            self._graph_task = task
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end)

    def _end(self) -> None:
        self._graph_task, self._gradients, self._provided = -1, (0, []), (0, -1)
        if self._passed == 2:  # nothing follows the backward of the first stage
            self._passed = 1
            self._kept, self._checkpoints, self._repeats = {}, {}, {}
            self._next = len(self.program.schedule)
        self._around.settle()
