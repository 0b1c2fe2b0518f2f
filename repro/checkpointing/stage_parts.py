"""Modules and parameters of a stage, which may be a module, a function, a method or a partial."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from .values import StageFn

_LONGEST, _DEEPEST = 1000, 4


def modules_of(stage: StageFn) -> list[nn.Module]:
    """The modules that a stage consists of or refers to, without those inside of others."""
    found: list[nn.Module] = []

    def look(at: Any, depth: int) -> None:
        if isinstance(at, nn.Module):
            found.append(at)
        elif isinstance(at, functools.partial):
            for part in (at.func, *at.args, *at.keywords.values()):
                look(part, depth)
        elif isinstance(at, types.MethodType):
            look(at.__self__, depth)
        elif isinstance(at, types.FunctionType) and depth < _DEEPEST:
            for cell in at.__closure__ or ():
                try:
                    look(cell.cell_contents, depth + 1)
                except ValueError:
                    continue
        elif isinstance(at, (list, tuple)) and depth < _DEEPEST and len(at) <= _LONGEST:
            for item in at:
                look(item, depth + 1)

    look(stage, 0)
    return found


def parameters_of(stage: StageFn) -> list[nn.Parameter]:
    """A stage's parameters, each once."""
    seen = {p: None for module in modules_of(stage) for p in module.parameters()}
    return list(seen)


class StandIns:
    """While stages are profiled, other parameters with the same values take the places of theirs:
    neither gradients nor hooks of the real ones notice.  Parameters that no module owns stay, and
    get their gradient back."""

    def __init__(self, stages: Sequence[StageFn]) -> None:
        self._modules = [m for stage in stages for root in modules_of(stage) for m in root.modules()]
        self._before = [(p, p.grad) for stage in stages for p in parameters_of(stage)]
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    def __enter__(self) -> None:
        self._replace(self._stand_in)

    def __exit__(self, *error: object) -> None:
        back = {made: real for real, made in self._made.items()}
        self._replace(lambda made: back.get(made, made))
        for parameter, gradient in self._before:
            parameter.grad = gradient

    def _stand_in(self, real: nn.Parameter) -> nn.Parameter:
        if type(real) is not nn.Parameter:  # sharded, uninitialised, ...
            return real
        if real not in self._made:
            self._made[real] = nn.Parameter(real.detach(), requires_grad=real.requires_grad)
        return self._made[real]

    def _replace(self, other: Callable[[nn.Parameter], nn.Parameter]) -> None:
        for module in dict.fromkeys(self._modules):
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and (new := other(parameter)) is not parameter:
                    setattr(module, name, new)
