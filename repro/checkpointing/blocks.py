"""Which blocks of a model to recompute, when the model is not a chain that can be taken apart.

    found = plan_blocks(model, (ids,), {"labels": ids}, budget_bytes=2 * 2**30)
    print(found)                  # names of the blocks to recompute, bytes, overhead
    with found.applied(model):    # they run again in the backward
        model(ids, labels=ids).loss.backward()

For models with lists of like blocks (`layers`, `h`, ...) that their own forward calls, in any order
and with anything around them: Hugging Face transformers, encoders with decoders, U-Nets.  One step is
measured in which every block runs again; from its timeline follows what a step takes in which some
do not (block_step.py).  The plan recomputes whole blocks, which is what torch.utils.checkpoint and
FSDP's apply_activation_checkpointing take: a list of modules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from analysis.arguments import byte_count, flag, methods, whole
from analysis.checkpointing import InfeasibleBudgetError
from analysis.checkpointing.modules import checkpoint_code

from .arguments import Arguments
from .block_runs import InnerGradientError, again_in_backward, replaced
from .block_step import Call, Recorder, Timeline, seconds
from .kept import changed, newest_node, outside, refuse_earlier_graph
from .memory import memory_meter
from .replay import cuda_devices
from .state import left_alone
from .values import Held, Values, storage_bytes

__all__ = ["BlockPlan", "blocks_of", "plan_blocks"]


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks by name: the members of every nn.ModuleList or nn.Sequential of two or more
    members of one class, of lists inside each other the outer ones.  ValueError names what to do
    where there is none."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        members = dict(module.named_children())
        inside = any(name == block or name.startswith(f"{block}.") for block in found)
        if inside or len(members) < 2 or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        if len({type(member) for member in members.values()}) == 1:
            found |= {f"{name}.{key}" if name else key: member for key, member in members.items()}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no list of two or more like blocks: pass their names "
            "(blocks=[...]), or make it an nn.Sequential or give it a stages() method and use "
            "plan()"
        )
    return found


@dataclass(frozen=True)
class BlockPlan:
    """recompute: names of the blocks to put a checkpoint around; keep: the other blocks.

    predicted_peak_bytes: activations, interiors, gradients and temporaries at the peak, loss and
    logits included; weights, their gradients and optimiser states are not.  stored_peak_bytes: the
    same if nothing is recomputed.  overhead: extra time over a step that recomputes nothing.
    result_bytes: of both, what the model returns and its loss, which the usual loop
    (`out = model(...); out.loss.backward()`) holds to the end; `model(...).loss.backward()` takes up
    to that much less.  resident_bytes: weights, gradients and optimiser states, where the budget was
    one of everything.  inner: blocks that call autograd in their own forward.
    """

    recompute: tuple[str, ...]
    keep: tuple[str, ...]
    predicted_peak_bytes: int
    stored_peak_bytes: int
    overhead: float
    result_bytes: int = 0
    resident_bytes: int = 0
    inner: frozenset[str] = field(default=frozenset(), repr=False)

    def __str__(self) -> str:
        mib = 2**20
        what = (
            f"recompute {len(self.recompute)} of {len(self.recompute) + len(self.keep)} blocks: "
            f"{', '.join(self.recompute)}"
            if self.recompute
            else "fits without recomputation"
        )
        return (
            f"{what}\npeak {self.predicted_peak_bytes / mib:.1f} MiB of activations predicted, "
            f"{self.stored_peak_bytes / mib:.1f} MiB if everything is kept; "
            f"{self.overhead:+.1%} time"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "recompute": list(self.recompute),
            "keep": list(self.keep),
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "resident_bytes": self.resident_bytes,
            "overhead": self.overhead,
        }

    def code(self, model: str = "model") -> str:
        """Python that applies the plan without this package, two ways."""
        return checkpoint_code(self.recompute, model)

    def applied(self, model: nn.Module, *, check_recompute: bool = True) -> AbstractContextManager[None]:
        """While open, the blocks run again in the backward, in the modules' own places.

        Gradients and buffers are the model's, bit for bit, or RuntimeError names the block, as of a
        planned model; with check_recompute=False nobody looks whether a second run differs.
        """
        flag("check_recompute", check_recompute)
        return replaced(
            {
                block: again_in_backward(block, name, inner=name in self.inner, check=check_recompute)
                for name in self.recompute
                for block in (model.get_submodule(name),)
            }
        )


def plan_blocks(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget_bytes: int | None = None,
    total_budget_bytes: int | None = None,
    bytes_a_parameter: float = 16.0,
    blocks: Sequence[str] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    repeats: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> BlockPlan:
    """The fewest seconds of recomputation of whole blocks that fit into a budget.

    args, kwargs: what the model is called with, of the shapes to train on
    budget_bytes: of activations and what belongs to them (`BlockPlan.predicted_peak_bytes`)
    total_budget_bytes: of everything: the same plus `bytes_a_parameter` for weights, gradients and
        optimiser states (16: mixed-precision Adam; 16 is also 4 + 4 + 8 in fp32)
    blocks: their names, instead of every list of like modules (`blocks_of`)
    loss: a function of the model's result; default: its `.loss`, its ["loss"], or the mean square
        of its first tensor
    repeats: timed steps, of whose seconds the median counts; 0: all blocks count the same
    progress: called with the steps done and all there are

    The step that is measured is run here, with gradients of all weights beside it.  Under autocast its
    backward is run outside of it, as torch advises.

    Raises TypeError for arguments of another kind, ValueError for no or two budgets, an impossible
    one, a model without blocks, blocks inside each other or that are not called,
    InfeasibleBudgetError where recomputing blocks does not help enough, RuntimeError for a block
    that goes on from a result of an earlier step with its graph.
    A block that changes what nobody puts back is kept.  The model is left as it was.
    """
    if (budget_bytes is None) == (total_budget_bytes is None):
        raise ValueError(f"budget_bytes={budget_bytes} and total_budget_bytes={total_budget_bytes}: give one")
    if budget_bytes is not None:
        budget_bytes = byte_count("budget_bytes", budget_bytes)
    if total_budget_bytes is not None:
        total_budget_bytes = byte_count("total_budget_bytes", total_budget_bytes)
    repeats = whole("repeats", repeats, least=0)
    if progress is not None:
        methods("progress", progress, "__call__")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is not a torch.nn.Module")
    found = blocks_of(model) if blocks is None else {n: model.get_submodule(n) for n in blocks}
    for name in found:
        if inside := [other for other in found if other.startswith(f"{name}.")]:
            raise ValueError(f"block {inside[0]} is a part of block {name}: name one of the two")
    resident = 0
    if total_budget_bytes is not None:
        resident = math.ceil(bytes_a_parameter * sum(p.numel() for p in model.parameters()))
    given = Arguments(args if isinstance(args, tuple) else (args,), dict(kwargs or {}))
    steps = Steps(model, given, found, loss or loss_of, progress)
    timeline, seconds, step_s = steps.measured(repeats)
    available = total_budget_bytes if budget_bytes is None else budget_bytes
    assert available is not None
    beside = resident + storage_bytes(given.tensors)
    path = list(timeline.path(seconds, steps.kept))
    stored = path[0][1]
    fitting = [again for again, peak in path if peak + beside <= available]
    if not fitting:
        least = min(peak for _, peak in path) + beside
        raise InfeasibleBudgetError(available, least)
    again = fitting[0]
    for name in reversed(again[:-1]):  # of those, what is not needed after all
        fewer = [other for other in again if other != name]
        if timeline.peak(fewer) + beside <= available:
            again = fewer
    return BlockPlan(
        tuple(name for name in found if name in again),
        tuple(name for name in found if name not in again),
        timeline.peak(again) + beside - resident,
        stored + beside - resident,
        sum(seconds[name] for name in again) / step_s,
        steps.result_bytes,
        resident,
        frozenset(steps.inner),
    )


def loss_of(result: Any) -> Tensor:
    """A scalar of what a model returns: `.loss`, ["loss"], or the mean square of a tensor."""
    found = getattr(result, "loss", None)
    if found is None and isinstance(result, Mapping):
        found = result.get("loss")
    if isinstance(found, Tensor):
        return found
    for leaf in _pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.float().square().mean()
    raise TypeError(f"the model returned {type(result).__name__} without a loss: pass loss=")


class Steps:
    """Steps of a model whose blocks run again; what is found on the way.

    inner: blocks that call autograd in their own forward.  kept: blocks that change what nobody
    puts back, with its names.  result_bytes: of the model's result and its loss.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Arguments,
        blocks: dict[str, nn.Module],
        loss: Callable[[Any], Tensor],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._model, self._given, self.blocks, self._loss = model, given, blocks, loss
        self._progress = progress
        self._held = Held(Values.of_tensors(given.tensors))
        self._device = next(model.parameters()).device.type
        self.inner: set[str] = set()
        self.kept: dict[str, tuple[str, ...]] = {}
        self.result_bytes = 0

    def measured(self, repeats: int) -> tuple[Timeline, dict[str, float], float]:
        """The timeline; seconds of each block's forward; and of a step that recomputes nothing."""
        done, steps = itertools.count(1), 3 + repeats

        def advance() -> None:
            if self._progress is not None:
                self._progress(next(done), steps)

        devices = cuda_devices(self._given.tensors, self._model.parameters())
        with left_alone([self._model], devices), torch.enable_grad():
            for parameter in self._model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            try:
                self._look()
                advance()
                unheld = self._refuse_earlier_graph()
                advance()
                timed = []
                for _ in range(repeats):
                    timed.append(self._timed())
                    advance()
                with memory_meter(self._device) as meter:
                    recorder = Recorder(lambda: meter.region("stretch"), follow=True)
                    self._step(recorder, backward=True)
                advance()
                timeline = Timeline(recorder, unheld)
            finally:
                for parameter in self._model.parameters():
                    parameter.grad = None
        absent = [name for name in self.blocks if name not in timeline.blocks]
        if absent:
            raise ValueError(f"the model's forward does not call {', '.join(absent)}: name the blocks that it calls")
        if not timed:
            return timeline, dict.fromkeys(self.blocks, 1.0), 3.0 * len(self.blocks)
        forwards = {name: median(found[name] for found, _ in timed) for name in self.blocks}
        return timeline, forwards, median(whole for _, whole in timed)

    def _look(self) -> None:
        """A forward, which tells what each block changes, and whether it differentiates."""
        while True:
            try:
                self._step(_Looking(self), backward=False)
                break
            except InnerGradientError as error:
                self.inner.add(error.block)

    def _refuse_earlier_graph(self) -> Recorder:
        """Another forward, whose graph must not lead to the one before."""
        start, recorder = newest_node(), Recorder(nullcontext, hold=False)
        loss = self._step(recorder, backward=False)
        refuse_earlier_graph(list(self.blocks.values()), [loss], start)
        return recorder

    def _timed(self) -> tuple[dict[str, float], float]:
        """Seconds of the blocks' forwards, and of the step without second runs."""
        wait = torch.cuda.synchronize if self._device == "cuda" else _nothing
        recorder = Recorder(lambda: seconds(wait))
        self._step(recorder, backward=True)
        spans = [found[0] for found in recorder.stretches]
        again = sum(spans[call.again] for call in recorder.calls if call.again is not None)
        forwards = dict.fromkeys(self.blocks, 0.0)
        for call in recorder.calls:
            forwards[call.block] += spans[call.forward]
        return forwards, sum(spans) - again

    def _step(self, recorder: Recorder, *, backward: bool) -> Tensor:
        forwards = {
            block: again_in_backward(block, name, inner=name in self.inner, check=False, recorder=recorder)
            for name, block in self.blocks.items()
        }
        given = self._held.again("an argument")
        try:
            with replaced(forwards):
                recorder.cut()
                result = self._model(*self._given.args(given), **self._given.kwargs(given))
                loss = self._loss(result)
            recorder.cut()
            leaves = [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            self.result_bytes = storage_bytes([*leaves, loss])
            del leaves
            torch.clear_autocast_cache()
            if backward:
                with ExitStack() as stack:
                    for kind in {"cpu", self._device}:
                        stack.enter_context(torch.autocast(kind, enabled=False))
                    loss.backward()
        finally:
            recorder.close()
        return loss


class _Looking(Recorder):
    """Looks at what the blocks change that nobody puts back."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(nullcontext)
        self._steps = steps

    @contextmanager
    def first(self, block: str, given: Iterable[Tensor]) -> Iterator[Call]:
        module = self._steps.blocks[block]
        before = outside(module)
        with super().first(block, given) as call:
            yield call
        if changes := changed(before, outside(module)):
            self._steps.kept[block] = changes


def _nothing() -> None:
    pass
