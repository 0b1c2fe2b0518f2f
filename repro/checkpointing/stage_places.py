"""Where a stage keeps what it remembers from one call to the next.

Looked at: parameters, buffers and all other attributes of its modules; what functions, partials and
bound methods among the stages refer to; numbers, containers, tensors, arrays and private random
generators in them.  Not looked at: module globals, iterators, objects written in C.  What changes
there is noticed by the result of the repeated run (fingerprint.py).

Looking takes as long as a small stage runs, so it is done once and the places serve every step
until one of them holds something else.
"""

from __future__ import annotations

import functools
import operator
import random
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LONGEST = 1000  # containers beyond it are data, not state
_DEEPEST = 4
#: Stands for a value that is left where it is: a result of other operations.
LEAVE = object()
#: Attributes of a module that torch itself looks after.
MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}
_CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes, type})
_CONTAINERS = (list, set, deque, bytearray)
_FOREIGN = ("torch", "logging", "threading")  # objects of these packages are not opened


class Places:
    """The places of one stage, or of several in a list, and what each refers to.

    dicts: (place, its items, is it a module's own?)
    cells, contents: variables of closures, and containers, each with what was in it
    parts: the modules inside each module
    arrays, tensors, generators: the objects themselves; of a tensor its name, of a generator how to
        set its state and how to read it
    whole: nothing was passed over that may be state at another time
    """

    def __init__(self, stage: object) -> None:
        self.dicts: list[tuple[dict, dict, bool]] = []
        self.cells: list[tuple[Any, Any]] = []
        self.contents: list[tuple[Any, Any]] = []
        self.parts: list[tuple[dict, dict]] = []
        self.arrays: list[np.ndarray] = []
        self.tensors: list[tuple[Tensor, str]] = []
        self.generators: list[tuple[Callable[[Any], Any], Callable[[], Any]]] = []
        self.whole = True
        self._seen: dict[int, Any] = {}  # keeps what it names alive, so that no id is used twice
        self._walk(stage, "", 0)
        del self._seen

    def unchanged(self) -> bool:
        """Whether all places are as they were: values may have been written to, none exchanged."""
        return (
            all(alike_dicts(place, items) for place, items, _ in self.dicts)
            and all(alike_dicts(place, parts) for place, parts in self.parts)
            and all(alike(container, then) for container, then in self.contents)
            and all(cell.cell_contents is then for cell, then in self.cells)
        )

    def _walk(self, found: Any, name: str, depth: int) -> None:
        if type(found) in _CONSTANTS or isinstance(found, (int, float, complex, str, bytes, type)):
            return
        if id(found) in self._seen:
            return
        if depth > _DEEPEST:
            self.whole = False
            return
        self._seen[id(found)] = found
        if isinstance(found, Tensor):
            self._tensor(found, name)
        elif isinstance(found, nn.Module):
            self._module(found, name, depth)
        elif isinstance(found, dict):
            self._dict(found, name, depth, own=False)
        elif isinstance(found, (*_CONTAINERS, tuple, frozenset)):
            self._container(found, name, depth)
        elif isinstance(found, np.ndarray):
            if found.dtype != object:
                self.arrays.append(found)
        elif not self._generator(found):
            self._object(found, name, depth)

    def _module(self, module: nn.Module, name: str, depth: int) -> None:
        self._seen[id(module)] = module
        weights = {
            # functional_call puts results of other operations in their place
            key: w.detach().requires_grad_() if w is not None and has_graph(w) else w
            for key, w in module._parameters.items()
        }
        self.dicts.append((module._parameters, weights, True))
        for key, weight in weights.items():
            self._walk(weight, f"{name}.{key}" if name else key, depth)
        self._dict(module._buffers, name, depth, own=True)
        self._dict(module.__dict__, name, depth, own=True)
        if module._modules:
            self.parts.append((module._modules, module._modules.copy()))
        for key, part in module._modules.items():
            if part is not None and id(part) not in self._seen:
                self._module(part, f"{name}.{key}" if name else key, depth)

    def _dict(self, place: dict, name: str, depth: int, *, own: bool) -> None:
        if len(place) > _LONGEST:
            self.whole = False
            return
        items = place.copy()
        self.dicts.append((place, items, own))
        for key, value in place.items():
            if type(value) in _CONSTANTS or (own and key in MODULES_OWN):
                continue
            if has_graph(value):
                items[key] = LEAVE
            else:
                self._walk(value, f"{name}.{key}" if name else str(key), depth + 1)

    def _container(self, found: Any, name: str, depth: int) -> None:
        if isinstance(found, _CONTAINERS):
            if isinstance(found, bytearray):
                self.contents.append((found, found.copy()))
                return
            if len(found) > _LONGEST or any(has_graph(item) for item in found):
                self.whole = False
                return
            self.contents.append((found, found.copy()))
        if len(found) <= _LONGEST:
            for item in found:
                if type(item) not in _CONSTANTS:
                    self._walk(item, name, depth + 1)

    def _tensor(self, tensor: Tensor, name: str) -> None:
        if has_graph(tensor):
            self.whole = False
        elif not is_sharded(tensor) and tensor.layout is torch.strided:
            self.tensors.append((tensor, name))

    def _generator(self, found: Any) -> bool:
        if isinstance(found, torch.Generator):
            self.generators.append((found.set_state, found.get_state))
        elif isinstance(found, random.Random):
            if not isinstance(found, random.SystemRandom):
                self.generators.append((found.setstate, found.getstate))
        elif isinstance(found, (np.random.Generator, np.random.RandomState)):
            bits = found.bit_generator if isinstance(found, np.random.Generator) else found
            owner: Any = getattr(bits, "_bit_generator", bits)
            self.generators.append((lambda s: setattr(owner, "state", s), lambda: owner.state))
        else:
            return False
        return True

    def _object(self, found: Any, name: str, depth: int) -> None:
        if str(getattr(found, "__module__", "")).partition(".")[0] in _FOREIGN:
            return
        if isinstance(found, functools.partial):
            for part in (found.func, found.args, found.keywords):
                self._walk(part, name, depth)
        elif isinstance(found, types.MethodType):
            self._walk(found.__self__, name, depth)
            self._walk(found.__func__, name, depth)
        elif isinstance(found, types.FunctionType):
            for variable, cell in zip(
                found.__code__.co_freevars, found.__closure__ or (), strict=True
            ):
                try:
                    content = cell.cell_contents
                except ValueError:  # not assigned yet
                    self.whole = False
                    continue
                if has_graph(content):
                    self.whole = False
                else:
                    self.cells.append((cell, content))
                self._walk(content, variable, depth)
            self._walk(found.__defaults__, name, depth)
            self._walk(vars(found), name, depth)
        elif isinstance(getattr(found, "__dict__", None), dict) and not isinstance(
            found, types.ModuleType
        ):
            self._dict(found.__dict__, name, depth, own=False)


def has_graph(value: Any) -> bool:
    """A result of other operations: to hold it would be to hold the run that made it."""
    return isinstance(value, Tensor) and value.grad_fn is not None


def is_sharded(value: Any) -> bool:
    return type(value).__name__ == "DTensor" or hasattr(value, "_local_tensor")


def alike_dicts(place: dict, then: dict) -> bool:
    """Whether the same keys have the very same values; False if only their order changed."""
    return place.keys() == then.keys() and all(map(operator.is_, place.values(), then.values()))


def alike(container: Any, then: Any) -> bool:
    if isinstance(container, (set, bytearray)):
        return bool(container == then)
    return len(container) == len(then) and all(a is b for a, b in zip(container, then, strict=True))
