"""What a forward run must find again when it is repeated: random numbers, autocast, buffers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]
StageFn = Callable[..., Any]


@dataclass(frozen=True)
class RandomState:
    """Generator states of the CPU (5,056 bytes, kept outside the tensor allocator) and GPUs."""

    cpu: bytes
    cuda: tuple[tuple[int, bytes], ...]

    @classmethod
    def now(cls, devices: tuple[int, ...]) -> RandomState:
        cuda = ((index, torch.cuda.get_rng_state(index)) for index in devices)
        return cls(
            torch.get_rng_state().numpy().tobytes(),
            tuple((index, state.numpy().tobytes()) for index, state in cuda),
        )

    def restore(self) -> None:
        torch.set_rng_state(_tensor(self.cpu))
        for index, state in self.cuda:
            torch.cuda.set_rng_state(_tensor(state), index)


def _tensor(state: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(state, dtype=np.uint8).copy())


def cuda_devices(state: State) -> tuple[int, ...]:
    """Indices of the GPUs that these tensors lie on."""
    return tuple(sorted({tensor.get_device() for tensor in state if tensor.is_cuda}))


class Surroundings:
    """Autocast settings at the time of the forward pass; `again()` re-enters them."""

    def __init__(self, state: State) -> None:
        self._kinds = sorted({"cpu", *(tensor.device.type for tensor in state)})
        self._settings = self._now()

    def _now(self) -> tuple[Any, ...]:
        kinds = [
            (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in self._kinds
        ]
        return (*kinds, torch.is_autocast_cache_enabled())

    def again(self) -> AbstractContextManager[object]:
        """A context with the same settings; none where they are in force anyway."""
        if self._now() == self._settings:
            return _NOTHING
        stack = ExitStack()
        *kinds, cache = self._settings
        for kind, enabled, dtype in kinds:
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
            )
        return stack


_NOTHING = nullcontext()


def as_state(value: Any, stage: str) -> State:
    """A stage's result as a tuple of tensors; TypeError names the stage and what it returned."""
    state = value if isinstance(value, tuple) else (value,)
    for item in state:
        if not isinstance(item, Tensor):
            raise TypeError(f"{stage} returned {type(item).__name__}, need a tensor or a tuple")
    return state


def call_again(stage: StageFn, state: State) -> Any:
    """Run a stage without letting it write to its buffers: a repeated run must not move batch-norm
    statistics a second time.  It works on copies meanwhile."""
    if not isinstance(stage, nn.Module):
        return stage(*state)
    found = [
        (module._buffers, name, buffer)
        for module in stage.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for buffers, name, buffer in found:
        buffers[name] = buffer.detach().clone()
    try:
        return stage(*state)
    finally:
        for buffers, name, buffer in found:
            buffers[name] = buffer


def storage_bytes(state: State | list[Tensor | None]) -> int:
    """Bytes of the distinct storages behind tensors."""
    storages = {}
    for tensor in state:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
