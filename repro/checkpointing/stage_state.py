"""What a stage remembers from one call to the next, so that a repeated run starts as the first did.

Looked at: parameters, buffers and all other attributes of its modules; what functions, partials and
bound methods among the stages refer to; numbers, containers, tensors, arrays and private random
generators in them.  Not looked at: module globals, iterators, objects written in C.  What changes
there is noticed by the result of the repeated run (fingerprint.py).
"""

from __future__ import annotations

import functools
import operator
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .values import storage_bytes, version

#: Larger tensors are watched but not copied before each run: masks, tables, weights.
COPIED_BYTES = 2**20
_LONGEST = 1000  # containers beyond it are data, not state
_DEEPEST = 4
_MISSING, _LEAVE = object(), object()
_MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}
_CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes, type})
_CONTAINERS = (list, set, deque, bytearray)
_FOREIGN = ("torch", "logging", "threading")  # objects of these packages are not opened


class Memory:
    """The state of one stage, or of several in a list, at one moment."""

    def __init__(self, stage: object, *, copied_bytes: float = COPIED_BYTES) -> None:
        self._limit = copied_bytes
        self._dicts: list[tuple[dict, dict, bool]] = []  # place, its items, is it a module's own?
        self._cells: list[tuple[Any, Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Callable[[Any], Any], Callable[[], Any], Any]] = []
        #: tensor, its name, version and address then, its values then (None: too large to copy)
        self._tensors: list[tuple[Tensor, str, int | None, int, Tensor | None]] = []
        self._seen: dict[int, Any] = {}  # keeps what it names alive, so that no id is used twice
        self._walk(stage, "", 0)
        del self._seen

    # -- looking ----------------------------------------------------------------------------------

    def _walk(self, found: Any, name: str, depth: int) -> None:
        if type(found) in _CONSTANTS or isinstance(found, (int, float, complex, str, bytes, type)):
            return
        if id(found) in self._seen or depth > _DEEPEST:
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
            if found.nbytes <= self._limit and found.dtype != object:
                self._arrays.append((found, found.copy()))
        elif not self._generator(found):
            self._object(found, name, depth)

    def _module(self, module: nn.Module, name: str, depth: int) -> None:
        self._seen[id(module)] = module
        weights = {
            # functional_call puts results of other operations in their place
            key: w.detach().requires_grad_() if w is not None and _has_graph(w) else w
            for key, w in module._parameters.items()
        }
        self._dicts.append((module._parameters, weights, True))
        for key, weight in weights.items():
            self._walk(weight, f"{name}.{key}" if name else key, depth)
        self._dict(module._buffers, name, depth, own=True)
        self._dict(module.__dict__, name, depth, own=True)
        for key, part in module._modules.items():
            if part is not None and id(part) not in self._seen:
                self._module(part, f"{name}.{key}" if name else key, depth)

    def _dict(self, place: dict, name: str, depth: int, *, own: bool) -> None:
        if len(place) > _LONGEST:
            return
        items = place.copy()
        self._dicts.append((place, items, own))
        for key, value in place.items():
            if type(value) in _CONSTANTS or (own and key in _MODULES_OWN):
                continue
            if _has_graph(value):
                items[key] = _LEAVE
            else:
                self._walk(value, f"{name}.{key}" if name else str(key), depth + 1)

    def _container(self, found: Any, name: str, depth: int) -> None:
        if isinstance(found, _CONTAINERS):
            if isinstance(found, bytearray):
                self._contents.append((found, found.copy()))
                return
            if len(found) > _LONGEST or any(_has_graph(item) for item in found):
                return
            self._contents.append((found, found.copy()))
        if len(found) <= _LONGEST:
            for item in found:
                if type(item) not in _CONSTANTS:
                    self._walk(item, name, depth + 1)

    def _tensor(self, tensor: Tensor, name: str) -> None:
        if _is_sharded(tensor) or tensor.layout is not torch.strided or _has_graph(tensor):
            return
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        small = not trained and tensor.nbytes <= self._limit
        copy = tensor.detach().clone() if small else None
        self._tensors.append((tensor, name, version(tensor), tensor.data_ptr(), copy))

    def _generator(self, found: Any) -> bool:
        if isinstance(found, torch.Generator):
            state = found.get_state()
            self._generators.append((found.set_state, found.get_state, state))
        elif isinstance(found, random.Random):
            if not isinstance(found, random.SystemRandom):
                self._generators.append((found.setstate, found.getstate, found.getstate()))
        elif isinstance(found, (np.random.Generator, np.random.RandomState)):
            bits = found.bit_generator if isinstance(found, np.random.Generator) else found
            owner: Any = getattr(bits, "_bit_generator", bits)
            self._generators.append(
                (lambda s: setattr(owner, "state", s), lambda: owner.state, owner.state)
            )
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
                    continue
                if not _has_graph(content):
                    self._cells.append((cell, content))
                self._walk(content, variable, depth)
            self._walk(found.__defaults__, name, depth)
            self._walk(vars(found), name, depth)
        elif isinstance(getattr(found, "__dict__", None), dict) and not isinstance(
            found, types.ModuleType
        ):
            self._dict(found.__dict__, name, depth, own=False)

    # -- after the first run ----------------------------------------------------------------------

    def settle(self, stage: str, *, strict: bool = True) -> int:
        """Keep copies only of what the run has changed; returns their bytes.

        If `strict`, RuntimeError where it has changed what cannot be put back: a trained parameter,
        or a tensor too large to have been copied.
        """
        kept: list[tuple[Tensor, str, int | None, int, Tensor | None]] = []
        freed: list[Tensor] = []
        for tensor, name, before, address, copy in self._tensors:
            moved = version(tensor) != before or tensor.data_ptr() != address
            if copy is None:
                if moved and strict:
                    raise RuntimeError(
                        f"{stage} writes to {name or 'a tensor'} of {tensor.nbytes:,} bytes while "
                        "it runs, which cannot be undone for a second run: write to a copy, or "
                        "choose a plan that runs this stage once (strategy='store-all')"
                    )
                kept.append((tensor, name, before, address, None))
            elif moved or (copy.device.type == "cpu" and not torch.equal(copy, tensor)):
                kept.append((tensor, name, before, address, copy))
                freed.append(copy)
        self._tensors = kept
        replaced = [
            value
            for place, items, _ in self._dicts
            for key, value in items.items()
            if isinstance(value, Tensor)
            and not isinstance(value, nn.Parameter)
            and place.get(key) is not value
        ]
        return storage_bytes([*freed, *replaced])

    # -- before and after a repeated run ----------------------------------------------------------

    @contextmanager
    def in_force(self, stage: str) -> Iterator[None]:
        """Put everything back as it was then; afterwards as it was just before.

        RuntimeError where a parameter, or a tensor without a copy, has been written to since."""
        for tensor, name, before, _, copy in self._tensors:
            if copy is None and version(tensor) != before:
                raise RuntimeError(
                    f"{name or 'a tensor'} of {stage} was changed by an in-place operation "
                    f"after the forward pass (version {before} then, {version(tensor)} now), "
                    "and the stage has to run with it again: call backward first"
                )
        with ExitStack() as undo, self._versions():
            self._restore(undo)
            yield
            undo.close()

    def put_back(self) -> None:
        """Put everything back as it was, for good."""
        with self._versions():
            self._restore(ExitStack())

    def _versions(self) -> AbstractContextManager[Any]:
        """Writing to tensors in here is no change that a graph should complain about."""
        written = tuple(
            t for t, *_, copy in self._tensors if copy is not None and not t.is_inference()
        )
        return (
            torch.autograd._unsafe_preserve_version_counter(written) if written else nullcontext()
        )

    def _restore(self, undo: ExitStack) -> None:
        for place, items, own in self._dicts:
            if not _alike_dicts(place, items):
                self._exchange(undo, place, items, own)
        for cell, then in self._cells:
            if cell.cell_contents is not then:
                undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
                cell.cell_contents = then
        for container, then in self._contents:
            if not _alike(container, then):
                undo.callback(_refill, container, container.copy())
                _refill(container, then)
        for array, then in self._arrays:
            if not np.array_equal(array, then):
                undo.callback(np.copyto, array, array.copy())
                np.copyto(array, then)
        for write, read, then in self._generators:
            undo.callback(write, read())
            write(then)
        written = [(tensor, copy) for tensor, *_, copy in self._tensors if copy is not None]
        if written:
            tensors = [tensor.detach() for tensor, _ in written]
            undo.callback(_write, tensors, [tensor.clone() for tensor in tensors])
            _write(tensors, [copy for _, copy in written])

    @staticmethod
    def _exchange(undo: ExitStack, place: dict, items: dict, own: bool) -> None:
        for key, then in items.items():
            now = place.get(key, _MISSING)
            if now is then or then is _LEAVE or (own and key in _MODULES_OWN):
                continue
            if _is_sharded(now) or _is_sharded(then):
                continue  # the sharding of weights is somebody else's business
            undo.callback(_assign, place, key, now)
            place[key] = then
        for key in [k for k in place if k not in items and not (own and k in _MODULES_OWN)]:
            if not _has_graph(place[key]):
                undo.callback(_assign, place, key, place[key])
                del place[key]


def _has_graph(value: Any) -> bool:
    """A result of other operations: to hold it would be to hold the run that made it."""
    return isinstance(value, Tensor) and value.grad_fn is not None


def _is_sharded(value: Any) -> bool:
    return type(value).__name__ == "DTensor" or hasattr(value, "_local_tensor")


def _assign(place: dict, key: Any, value: Any) -> None:
    if value is _MISSING:
        place.pop(key, None)
    else:
        place[key] = value


def _write(tensors: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(tensors, values)


def _alike_dicts(place: dict, then: dict) -> bool:
    """Whether the same keys have the very same values; False if only their order changed."""
    return place.keys() == then.keys() and all(map(operator.is_, place.values(), then.values()))


def _alike(container: Any, then: Any) -> bool:
    if isinstance(container, (set, bytearray)):
        return bool(container == then)
    return len(container) == len(then) and all(a is b for a, b in zip(container, then, strict=True))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content) if isinstance(container, set) else container.extend(content)
