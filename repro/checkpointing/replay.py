"""The surroundings that a forward run must find again when it is repeated: random numbers, autocast
and the other settings of torch that choose what an operation computes."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """States of the generators that everybody shares: torch's on the CPU (5,056 bytes, kept outside
    the tensor allocator) and on GPUs, Python's and NumPy's."""

    cpu: bytes
    cuda: tuple[tuple[int, bytes], ...]
    python: object
    numpy: tuple[Any, ...]

    @classmethod
    def now(cls, devices: tuple[int, ...], before: RandomState | None = None) -> RandomState:
        """The states; `before`, an earlier one, saves reading NumPy's where nobody drew from it."""
        cuda = ((index, torch.cuda.get_rng_state(index)) for index in devices)
        return cls(
            torch.get_rng_state().numpy().tobytes(),
            tuple((index, state.numpy().tobytes()) for index, state in cuda),
            random.getstate(),
            before.numpy if before is not None and _undrawn(before.numpy) else _numpy_now(),
        )

    def restore(self) -> None:
        torch.set_rng_state(_tensor(self.cpu))
        for index, state in self.cuda:
            torch.cuda.set_rng_state(_tensor(state), index)
        random.setstate(self.python)  # type: ignore[arg-type]
        name, keys, *rest = self.numpy
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


def _numpy_now() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return (name, np.asarray(keys).tobytes(), *rest)


def _undrawn(before: tuple[Any, ...]) -> bool:
    """Whether NumPy's generator is surely in this state still: its words and its position are the
    same, and no second normal number waits, which could be taken without changing them.

    Copying the state takes 60 µs, as long as a small stage; looking at it where it lies takes 2.
    """
    generator = np.random.mtrand._rand._bit_generator
    name, words, position, waiting, _ = before
    if waiting or name != "MT19937" or type(generator) is not np.random.MT19937:
        return False
    raw = ctypes.string_at(generator.ctypes.state_address, len(words) + 4)
    return raw == words + int(position).to_bytes(4, sys.byteorder)


def _tensor(state: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(state, dtype=np.uint8).copy())


def cuda_devices(*groups: Any) -> tuple[int, ...]:
    """Indices of the GPUs that these tensors lie on."""
    return tuple(sorted({t.get_device() for group in groups for t in group if t.is_cuda}))


#: Settings of a process or thread that choose an operation's kernel or its result's type.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


class Surroundings:
    """Autocast and settings at the time of the forward pass; `again()` re-enters them."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._kinds = kinds
        self.autocast = autocast_now(kinds)
        self._cache = torch.is_autocast_cache_enabled()
        self._settings = [read() for read, _ in _SETTINGS]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with gradients on and the same settings as then."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            now = autocast_now(self._kinds), torch.is_autocast_cache_enabled()
            if now != (self.autocast, self._cache):
                for kind, enabled, dtype in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
            for (read, write), then in zip(_SETTINGS, self._settings, strict=True):
                if (value := read()) != then:
                    stack.callback(write, value)
                    write(then)
            yield


def autocast_now(kinds: tuple[str, ...]) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """(device, on or off, type) of automatic mixed precision in this thread."""
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
