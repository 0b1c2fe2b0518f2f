"""A model as the list of its stages, joined where one of them does not make its output anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .values import Held, StageFn, Values, call, version


def stages_of(model: Any) -> list[StageFn]:
    """The stages of a sequential model: an nn.Sequential, an object with a `stages()` method, or
    any iterable of callables.  TypeError for anything else, ValueError when there is none."""
    if isinstance(model, nn.Sequential) and type(model).forward is not nn.Sequential.forward:
        raise TypeError(
            f"{type(model).__name__} is an nn.Sequential with a forward of its own: give it a "
            "stages() method, or plan its parts"
        )
    if callable(getattr(model, "stages", None)):
        found: list[StageFn] = list(model.stages())
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
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(model, name, None) for name in hooks):
        cure = "register them on the planned model instead"
        if type(model).__name__.startswith("FSDP"):
            cure = "shard its stages, plan, and only then call fully_shard on the whole model"
        raise ValueError(f"{type(model).__name__} has hooks of its own, which its stages do not run: {cure}")
    return found


class Joined(nn.Module):
    """Stages that must run as one, because one returns its input or writes to it."""

    def __init__(self, parts: Sequence[StageFn], unpack: bool = True) -> None:
        super().__init__()
        self.parts, self.unpack = tuple(parts), unpack
        self.modules_of_parts = nn.ModuleList(p for p in parts if isinstance(p, nn.Module))

    @property
    def kind(self) -> str:
        return getattr(self.parts[0], "kind", "")

    def forward(self, *inputs: Any) -> Any:
        value = inputs if self.unpack or len(inputs) != 1 else inputs[0]
        for part in self.parts:
            value = call(part, value, self.unpack)
        return value


def join_stages(stages: Sequence[StageFn], inputs: tuple[Any, ...], *, unpack: bool = True) -> list[StageFn]:
    """Stages such that each makes its output anew: one that returns a view of its input, or writes
    to it, is joined with the stage before (a first one with the stage after).

    Raises ValueError when the first stage writes to the model's input.
    """
    groups: list[list[StageFn]] = []
    open_group = True  # does the next stage belong to the last group whatever it does?
    value: Any = given_to_first(inputs, unpack)
    for number, stage in enumerate(stages, start=1):
        state = Values.of(value, "the model's input").tensors
        versions = [version(tensor) for tensor in state]
        before = {tensor.untyped_storage()._cdata for tensor in state}
        after = Values.of(_without_graph(stage, value, unpack), f"stage {number}")
        written = any(version(t) != v for t, v in zip(state, versions, strict=True))
        aliased = any(tensor.untyped_storage()._cdata in before for tensor in after.tensors)
        if written and (len(groups) == 0 or (open_group and len(groups) == 1)):
            raise ValueError(
                f"stage {number} ({type(stage).__name__}) writes to the model's input, which recomputation needs again"
            )
        if groups and (open_group or written or aliased):
            groups[-1].append(stage)
        else:
            groups.append([stage])
        # Only leading stages leave their group open: what they return is the model's input.
        open_group = aliased and len(groups) == 1 and (open_group or len(groups[0]) == 1)
        value = after.rebuild(tensor.detach() for tensor in after.tensors)
    return [group[0] if len(group) == 1 else Joined(group, unpack) for group in groups]


def given_to_first(inputs: tuple[Any, ...], unpack: bool) -> Any:
    """What the first stage is called with: nn.Sequential takes one argument."""
    return inputs if unpack or len(inputs) != 1 else inputs[0]


def _without_graph(stage: StageFn, value: Any, unpack: bool) -> Any:
    try:
        with torch.no_grad():
            return call(stage, value, unpack)
    except RuntimeError:  # it may need a gradient of its input in its own forward
        again = Held(Values.of(value, "the input")).again("the input")
        fresh = Values.of(again, "the input")
        for tensor in fresh.tensors:
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        with torch.enable_grad():
            return call(stage, again, unpack)
