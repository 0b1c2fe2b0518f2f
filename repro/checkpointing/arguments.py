"""Arguments: what plan() and profile() refuse before they run anything, and those of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from analysis.arguments import flag, names, whole

#: Options of planners that are counts; "kinds" are names, the others flags.
_COUNTS = frozenset({"segments", "stages", "states", "k", "slots", "grid"})


def check_options(strategy: str, planner: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for an option that the planner does not have, or of a wrong
    kind, and for one that it needs and has not got; counts must be at least 1."""
    parameters = dict(list(inspect.signature(planner).parameters.items())[1:])
    known = list(parameters)
    for name, value in options.items():
        if name not in known or name == "budget_bytes":
            there = ", ".join(n for n in known if n != "budget_bytes") or "no options"
            raise TypeError(f"strategy {strategy!r} has no option {name!r}; it has {there}")
        if name == "kinds":
            names(name, value)
        elif name in _COUNTS:
            whole(name, value, least=1)
        elif name == "keep_last":
            flag(name, value)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in {*options, "budget_bytes"}:
            raise ValueError(f"strategy {strategy!r} needs {name}, got None")


def check_sample(sample: Any) -> None:
    """Raise TypeError for a sample without a dense tensor."""
    given = sample if isinstance(sample, tuple) else (sample,)
    tensors = [value for value in given if isinstance(value, Tensor)]
    if sample is None or not given:
        raise TypeError(f"sample={sample!r} is not a tensor or a tuple of arguments")
    for tensor in tensors:
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
            raise TypeError(f"a tensor of the sample is {kind}; dense (strided) ones are planned")
    refuse_unreal("the sample", tensors)


def refuse_unreal(where: str, tensors: Iterable[Tensor]) -> None:
    """TypeError where tensors have no elements: a plan measures stages, and runs them again."""
    faking = torch._guards.detect_fake_mode() is not None
    for tensor in tensors:
        kind = "on meta" if tensor.is_meta else "fake" if isinstance(tensor, FakeTensor) else ""
        if kind or faking:
            raise TypeError(
                f"a tensor of {where} is {kind or 'in a fake mode'}: a planned model needs real "
                "tensors; to estimate memory without them use the model that was planned "
                "(planned.model)"
            )


class Arguments:
    """Arguments of a call, with places for other tensors of the same kinds."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._spec = _pytree.tree_flatten((args, kwargs))
        for leaf in leaves:
            if type(leaf).__name__.endswith("Cache"):
                raise ValueError(
                    f"a block is called with a {type(leaf).__name__}, which a second run would "
                    "fill twice: call the model with use_cache=False"
                )
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: tuple[Tensor, ...] = tuple(leaves[i] for i in self._places)

    def _with(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        found: tuple[tuple[Any, ...], dict[str, Any]] = _pytree.tree_unflatten(leaves, self._spec)
        return found

    def args(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return self._with(tensors)[0]

    def kwargs(self, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
        return self._with(tensors)[1]
