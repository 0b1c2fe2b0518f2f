"""What a stage leaves behind when it has run: tensors that somebody keeps, and changes elsewhere.

Tensors count in a plan for as long as they are there, whoever holds them.  What changes outside of
buffers and attributes (a global, an attribute of a class, the content of a list) is put back by
nobody: a plan that runs the stage again would change it again, and is refused.
"""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from .saved import INNER_HOOKS
from .stage_parts import modules_of
from .swap import Watched
from .values import Held, StageFn, Values, call

_LONGEST = 1000  # items of a container that are looked at
_LONGEST_MEMORY = 8  # runs whose tensors somebody keeps together
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, set, deque, bytearray)
_FOREIGN = ("torch", "numpy", "builtins")


@dataclass(frozen=True)
class Kept:
    """kept_bytes: of tensors that outlive the run and its graph.  graph_bytes: of others that its
    graph holds though it saves nothing, as hooks inside the stage make it.  overlap_bytes: those of
    either that the stage also saves or returns.
    changes: what it changes that nobody puts back, by name.  runs: after so many it keeps
    no more than before; 1 too where it keeps more and more, which somebody else clears each step.
    """

    kept_bytes: int
    graph_bytes: int
    overlap_bytes: int
    changes: tuple[str, ...]
    runs: int = 1


def left_behind(stage: StageFn, held: Held, unpack: bool, *, hold: bool) -> Kept:
    """Run a stage that has run before and look at what it leaves.  hold: it calls autograd itself,
    so its graph has to hold what it saves.

    RuntimeError where it uses a result that an earlier run left with its graph.
    """
    before = outside(stage)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor | None:
        kept = tensor.detach()
        saved[kept.untyped_storage()._cdata] = kept
        return kept if hold else None

    torch.clear_autocast_cache()  # its casts belong to whatever run needed them first
    start = newest_node()
    with (
        # Nothing can be compiled while operations are watched, and would stay so.
        torch.compiler.set_stance("force_eager"),
        torch.enable_grad(),
        Watched() as watched,
        INNER_HOOKS.without_graph(),
        saved_tensors_hooks(pack, lambda kept: kept),
    ):
        value = _pytree.tree_map_only(Tensor, _copied, held.again("the input"))
        inputs = Values.of(value, "the input").tensors
        outputs = Values.of(call(stage, value, unpack), "stage").tensors
    refuse_earlier_graph([stage], outputs, start)
    changes = changed(before, outside(stage))
    torch.clear_autocast_cache()
    returned = {tensor.untyped_storage()._cdata for tensor in outputs}
    given = {tensor.untyped_storage()._cdata for tensor in inputs}
    counted = returned | given | saved.keys()
    graph = [tensor.grad_fn for tensor in outputs]
    del value, inputs, outputs
    gc.collect()
    saved.clear()
    with_graph = watched.alive
    del graph
    gc.collect()
    kept = watched.alive
    if hold:
        with_graph = kept
    kept_bytes, runs = 0, 1
    if kept:
        kept_bytes, runs = _steady(watched, lambda: call(stage, held.again("the input"), unpack), hold=hold)
    return Kept(
        kept_bytes,
        sum(with_graph.values()) - sum(kept.values()),
        sum(size for key, size in with_graph.items() if key in counted),
        changes,
        runs,
    )


def _copied(tensor: Tensor) -> Tensor:
    """Of one's own, so that its release shows; no leaf, which its graph would hold."""
    return tensor.clone()


def _steady(watched: Watched, run: Callable[[], Any], *, hold: bool) -> tuple[int, int]:
    """What is kept of several runs together, once another adds nothing, and of how many it is."""
    found = [sum(watched.alive.values())]
    while len(found) <= _LONGEST_MEMORY:
        with (
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),
            watched,
            INNER_HOOKS.without_graph(),
            saved_tensors_hooks(lambda t: t.detach() if hold else None, lambda t: t),
        ):
            run()
        torch.clear_autocast_cache()
        gc.collect()
        found.append(sum(watched.alive.values()))
        if found[-1] <= found[-2]:
            return found[-2], len(found) - 1
    return found[0], 1


# -- a graph of an earlier run ---------------------------------------------------------------------


def newest_node() -> int:
    """The number of a node of the autograd graph that is made now; later ones are larger."""
    node: Any = torch.ones((), requires_grad=True).mul(1).grad_fn
    return int(node._sequence_nr())


def refuse_earlier_graph(stages: Sequence[StageFn], outputs: Iterable[Tensor], start: int) -> None:
    """RuntimeError if the graph of a run of some stages leads to nodes that were there before it."""
    waiting: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        if node._sequence_nr() < start:
            stage = next((stage for stage in stages if any(_holders(stage))), stages[0])
            name = getattr(stage, "label", None) or type(stage).__name__
            holders = ", ".join(_holders(stage)) or "somewhere outside of its modules"
            raise RuntimeError(
                f"stage {name} uses a result of an earlier run together with its graph (kept in "
                f"{holders}): a backward would go on into that run, which is over. Keep it "
                "detached, as in self.state = y.detach(), or hand it on as a result of the stage"
            )
        waiting += [next_node for next_node, _ in node.next_functions if next_node is not None]


def _holders(stage: StageFn) -> Iterator[str]:
    """Attributes of a stage's modules that hold a result with its graph."""
    for module in _modules(stage):
        for name, value in vars(module).items():
            inside = value.values() if isinstance(value, dict) else value
            items = inside if isinstance(inside, (list, tuple, deque)) else [value]
            if name not in _PARTS and any(isinstance(item, Tensor) and item.grad_fn is not None for item in items):
                yield f"{type(module).__name__}.{name}"


_PARTS = frozenset(vars(nn.Module()))


def _modules(stage: StageFn) -> list[nn.Module]:
    return list(dict.fromkeys(m for root in modules_of(stage) for m in root.modules()))


# -- changes that nobody puts back -----------------------------------------------------------------


def changed(before: dict[str, object], after: dict[str, object]) -> tuple[str, ...]:
    """Names of what has changed."""
    return tuple(name for name in before if name in after and before[name] != after[name])


def outside(stage: StageFn) -> dict[str, object]:
    """What nobody puts back, as it is now, by name."""
    return dict(_outside(stage))


def _outside(stage: StageFn) -> Iterator[tuple[str, object]]:
    """What stands in containers among the attributes, in attributes of the classes, and in
    the globals and closures that forward functions name."""
    functions: dict[Callable[..., Any], None] = {}
    if isinstance(stage, types.FunctionType):
        functions[stage] = None
    classes: dict[type, None] = {}
    for module in _modules(stage):
        for name, value in vars(module).items():
            if name not in _PARTS and (isinstance(value, (dict, np.ndarray, *_CONTAINERS))):
                yield f"{type(module).__name__}.{name}", _content(value)
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if isinstance(hook, types.MethodType):
                for name, value in getattr(hook.__self__, "__dict__", {}).items():
                    yield f"{type(hook.__self__).__name__}.{name}", _content(value)
                hook = hook.__func__
            if isinstance(hook, types.FunctionType):
                functions[hook] = None
        classes |= dict.fromkeys(c for c in type(module).__mro__ if not _is_foreign(c))
    for kind in classes:
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType):
                functions[value] = None
            elif not name.startswith("__"):
                yield f"{kind.__name__}.{name}", _content(value)
    for function in functions:
        for name in _names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                yield f"the global {name}", _content(value)
                if isinstance(value, type) and not _is_foreign(value):
                    for key, item in vars(value).items():
                        if not key.startswith("__"):
                            yield f"{value.__name__}.{key}", _content(item)
        variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in variables:
            try:
                yield f"the variable {name}", _content(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _content(value: object) -> object:
    """Something that differs when numbers in a place, or in a container there, do.  One tensor in
    the place of another is no change, and counts by its bytes, unless it has a graph: a repeated
    run's leads nowhere."""
    if isinstance(value, _NUMBERS):
        return repr(value)  # NaN is no change
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _LONGEST and value.dtype != object else None
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, Tensor):
        return _item(value)
    if isinstance(value, dict):
        if len(value) > _LONGEST:
            return len(value)
        return tuple((key, _item(item)) for key, item in value.items())
    if isinstance(value, (list, deque, set)):
        return len(value) if len(value) > _LONGEST else (len(value), *map(_item, value))
    return None


def _item(value: object) -> object:
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.grad_fn._sequence_nr()
    return repr(value) if isinstance(value, _NUMBERS) else type(value)
