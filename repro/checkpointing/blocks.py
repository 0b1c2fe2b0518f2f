"""Which blocks of a model to recompute, when the model is not a chain that can be taken apart.

    found = plan_blocks(model, (ids,), {"labels": ids}, budget_bytes=2 * 2**30)
    print(found)                  # names of the blocks to recompute, bytes, overhead
    with found.applied(model):    # they run again in the backward
        model(ids, labels=ids).loss.backward()

For models with an embedding, a list of like blocks (`layers`, `h`, ...) and a head, called by their
own forward, as Hugging Face transformers are.  The model runs once without keeping anything; hooks
on the blocks see what each is called with, and every block is measured by itself.  What lies before
the first block and after the last one are two more stages of the chain.  The plan recomputes whole
blocks (analysis.checkpointing.greedy), which is what torch.utils.checkpoint and FSDP's
apply_activation_checkpointing take: a list of modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from analysis.arguments import byte_count, flag, methods, whole
from analysis.checkpointing import Chain, Plan, greedy, store_all
from analysis.checkpointing.schedule import Keep, Op

from .arguments import Arguments
from .block_runs import again_in_backward, replaced
from .memory import memory_meter
from .passed import Around, Passing
from .profiling import Found, Profile, ZeroGradients, profile_of, stage_bytes, stage_seconds
from .replay import autocast_now, cuda_devices
from .saved import INNER_HOOKS
from .span import Part
from .state import left_alone
from .values import Held, State, Values, storage_bytes

__all__ = ["BlockPlan", "blocks_of", "plan_blocks"]


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks by name: the longest nn.ModuleList or nn.Sequential whose members are of
    one class (of equal ones the outermost).  ValueError names what to do where there is none."""
    best: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        members = dict(module.named_children())
        if len({type(member) for member in members.values()}) == 1 and len(members) > len(best):
            best = {f"{name}.{key}" if name else key: member for key, member in members.items()}
    if len(best) < 2:
        raise ValueError(
            f"{type(model).__name__} has no list of two or more like blocks: pass their names "
            "(blocks=[...]), or make it an nn.Sequential or give it a stages() method and use "
            "plan()"
        )
    return best


@dataclass(frozen=True)
class BlockPlan:
    """recompute: names of the blocks to put a checkpoint around; keep: the other blocks.

    chain: stage 1 is what comes before the blocks, the last what comes after.
    predicted_peak_bytes: activations, interiors, gradients and temporaries at the peak, loss and
    logits included; weights, their gradients and optimiser states are not.  stored_peak_bytes: the
    same if nothing is recomputed.  result_bytes: of both, what the model returns and its loss,
    which the usual loop (`out = model(...); out.loss.backward()`) holds to the end;
    `model(...).loss.backward()` takes up to that much less.  resident_bytes: weights, gradients and
    optimiser states, where the budget was one of everything.  inner: blocks that call autograd in
    their own forward.
    """

    recompute: tuple[str, ...]
    keep: tuple[str, ...]
    chain: Chain = field(repr=False)
    plan: Plan = field(repr=False)
    predicted_peak_bytes: int
    stored_peak_bytes: int
    result_bytes: int = 0
    resident_bytes: int = 0
    inner: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def overhead(self) -> float:
        """Extra time over a step that recomputes nothing."""
        least = self.chain.forward_s + self.chain.backward_s
        return self.plan.seconds / least - 1 if least else 0.0

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
        return (
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (\n"
            "    apply_activation_checkpointing,\n)\n"
            f"recompute = {{{model}.get_submodule(name) for name in {list(self.recompute)!r}}}\n"
            f"apply_activation_checkpointing({model}, check_fn=lambda m: m in recompute)\n"
            "# or, keeping the names of parameters as they are:\n"
            "# from functools import partial; from torch.utils.checkpoint import checkpoint\n"
            "# for block in recompute:\n"
            "#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)\n"
        )

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
    blocks: their names, instead of the longest list of like modules
    loss: a function of the model's result; default: its `.loss`, its ["loss"], or the mean square
        of its first tensor
    progress: called with the parts measured and all there are: before the blocks, the blocks, after

    Raises TypeError for arguments of another kind, ValueError for no or two budgets, an impossible
    one, or a model without blocks, InfeasibleBudgetError where recomputing every block does not
    fit.  The model is left as it was.
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
    resident = 0
    if total_budget_bytes is not None:
        resident = math.ceil(bytes_a_parameter * sum(p.numel() for p in model.parameters()))
    given = args if isinstance(args, tuple) else (args,)
    measured, results = _profile(
        model, given, dict(kwargs or {}), list(found.values()), loss or loss_of, repeats, progress
    )
    available = total_budget_bytes if budget_bytes is None else budget_bytes
    assert available is not None
    chain, inside = measured.chain, range(2, len(measured.chain))
    plan = measured.plan_within(
        lambda budget: greedy(chain, budget, among=inside), available, resident + results, inside
    )
    again = {a.stage for a in plan.schedule if a.op is Op.FORWARD and a.keep is not Keep.ALL}
    measured.refuse_changes(again, "blocks= without it")
    recompute = tuple(name for stage, name in enumerate(found, start=2) if stage in again)
    keep = tuple(name for name in found if name not in recompute)
    return BlockPlan(
        recompute,
        keep,
        chain,
        plan,
        measured.peak_bytes(plan.schedule) + results,
        measured.peak_bytes(store_all(chain).schedule) + results,
        results,
        resident,
        frozenset(name for stage, name in enumerate(found, start=2) if stage in measured.inner),
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


class _FirstBlockError(Exception):  # no error, but what raises has that name
    """Ends a forward where the first block would begin."""


def _profile(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    blocks: list[nn.Module],
    loss: Callable[[Any], Tensor],
    repeats: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[Profile, int]:
    """The chain before, blocks, after, with the weights that both ends share; and the bytes of the
    model's result and loss."""
    entire = Arguments(args, kwargs)
    device = next(model.parameters()).device.type
    casting = any(on for _, on, _ in autocast_now(("cpu", device)))
    stages: list[Part] = []
    rows: list[Any] = []
    seconds: list[tuple[list[float], list[float]]] = []
    measuring = holding = False  # holding: the block that runs calls autograd itself
    handed_on: set[int] = set()  # storages of the last block's results

    def measure(part: Part, tensors: State) -> bool:
        held = Held(Values.of(tensors, part.label))
        with ZeroGradients(part):
            _, row, inner = stage_bytes(meter, part, held, True, casting, hold_result=False)
        rows.append(row)
        seconds.append(stage_seconds(part, held, True, repeats)[0] if repeats else ([1.0], [2.0]))
        stages.append(part)
        if progress is not None:
            progress(len(stages), len(blocks) + 2)
        return inner

    def before_block(block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal measuring, holding
        if measuring:
            return
        measuring = True
        call = Arguments(given, named)
        number = len(stages) - 1
        follows = number == 0 or {_storage(t) for t in call.tensors} & handed_on
        if block is not blocks[number % len(blocks)] or not follows:
            raise ValueError(
                f"something else runs before block {number + 1} of the {len(blocks)} named: name "
                "all blocks between the first and the last, in this order of being called"
            )
        part = Part(type(block).__name__, block, lambda *t: block(*call.args(t), **call.kwargs(t)))
        with saved_tensors_hooks(lambda t: t.detach(), lambda t: t):  # not those around the model
            holding = measure(part, call.tensors)
        measuring = False

    results: list[Any] = []

    def after_block(block: nn.Module, given: Any, result: Any) -> None:
        if measuring:
            return
        nonlocal handed_on
        leaves = _pytree.tree_leaves(result)
        handed_on = {_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        if block is blocks[-1]:
            results.append(result)

    def to_first(*tensors: Tensor) -> Any:
        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            before.ends()  # what the model's own forward holds is still there
            raise _FirstBlockError(args, kwargs)

        handle = blocks[0].register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
        try:
            model(*entire.args(tensors), **entire.kwargs(tensors))
        except _FirstBlockError as stopped:
            return stopped.args
        finally:
            handle.remove()
        raise ValueError("the model's forward does not call its first block")

    before = Part("before", model, to_first)
    devices = cuda_devices(entire.tensors, model.parameters())
    with left_alone([model], devices), torch.enable_grad(), memory_meter(device) as meter:
        measure(before, entire.tensors)
        handles = [b.register_forward_pre_hook(before_block, with_kwargs=True) for b in blocks]
        handles += [b.register_forward_hook(after_block) for b in blocks]
        try:
            hooks = saved_tensors_hooks(lambda t: t.detach() if holding else None, lambda t: t)
            with INNER_HOOKS.without_graph(), hooks:
                whole = model(*args, **kwargs)
                leaves = [leaf for leaf in _pytree.tree_leaves(whole) if isinstance(leaf, Tensor)]
                result_bytes = storage_bytes([*leaves, loss(whole)])
                del whole, leaves
        finally:
            for handle in handles:
                handle.remove()
        if len(stages) != len(blocks) + 1 or len(results) != 1:
            raise ValueError(f"the model's forward calls its {len(blocks)} blocks {len(stages) - 1} times")
        last = Values.of(results.pop(), "the last block")

        def from_last(*tensors: Tensor) -> Tensor:
            result = last.rebuild(tensors)
            around = after.around or Around()
            stretch = ExitStack()

            def block(*args: Any, **kwargs: Any) -> Any:
                around.held.append((args, kwargs))
                return result

            def last_block(*args: Any, **kwargs: Any) -> Any:
                stretch.enter_context(Passing(around))
                after.begins()
                return block(*args, **kwargs)

            # What comes before the blocks runs too.
            forwards = {**dict.fromkeys(blocks, block), blocks[-1]: last_block}
            with replaced(forwards), stretch:
                return loss(model(*args, **kwargs))

        after = Part("after", model, from_last, late=True)
        measure(after, last.tensors)
    inside = {id(p) for block in blocks for p in block.parameters()}
    names: dict[nn.Parameter, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter] = names.get(parameter, 0) + 1
    tied = tuple(p for p, count in names.items() if count > 1 and id(p) not in inside)
    measured = [row() for row in rows]
    _passed_around(measured[0], measured[-1])
    _let_go(measured[-2], measured[-1])
    found = profile_of(stages, measured, seconds, storage_bytes(entire.tensors), shared=tied)
    return found, result_bytes


def _passed_around(before: Found, after: Found) -> None:
    """Gradients of tensors that go around all blocks, from the backward of what comes after the
    blocks until that of what comes before.

    A chain has no such thing.  They count as saved by stage 1, which is from the start, and so much
    less as saved by the last stage: that is exact in its runs, which measured them, and later.
    """
    passed = after.passed_gradient_bytes
    before.sizes["saved_bytes"] += passed
    after.sizes["saved_bytes"] = max(0, after.sizes["saved_bytes"] - passed)


def _let_go(block: Found, after: Found) -> None:
    """The last block's result, where no backward needs it: joined to something, or added to it.

    A chain holds it until the last stage's backward is over; autograd lets go of it in the forward,
    nobody knows when: so the peak of that forward, if it is the step's, is an upper bound.
    """
    if block.kept.uses_result or after.kept.uses_input or block.kept.kept_bytes:
        return
    gone = min(block.sizes["activation_bytes"], after.sizes["saved_bytes"])
    after.sizes["saved_bytes"] -= gone
    after.sizes["saving_temporary_bytes"] += gone


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
