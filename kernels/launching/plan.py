"""Launches recorded once and replayed with new addresses.

Which kernels a driver launches, with which grids and arguments, follows from shapes, strides, types
and options. The driver runs once, on arrays without memory (stand-ins), and the :class:`Plan` that
comes of it is replayed with the addresses of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from analysis.arguments import checked
from kernels.launch import Argument, Array, Backend, Kernel, TensorMap, contiguous_strides

#: A stand-in's address: its slot above, the offset in the array below these bits.
_SLOT_SHIFT = 40

A = TypeVar("A", bound=Argument)


@dataclass(frozen=True)
class Launch:
    """One call of :meth:`kernels.launch.Backend.launch`; arrays are at stand-in addresses."""

    kernel: Kernel
    grid: tuple[int, int, int]
    shared_bytes: int
    args: tuple[Argument, ...]
    pdl: bool = False


@dataclass(frozen=True)
class Plan:
    """The launches of a driver.

    scratch: arrays that the driver asked for. The caller's have the slots 0, 1, …, these the next.
    """

    launches: tuple[Launch, ...]
    scratch: tuple[Array, ...]

    @property
    def scratch_bytes(self) -> int:
        return sum(array.size * array.itemsize for array in self.scratch)


class Device(Protocol):
    """What a recorder is told of the device that the launches are for."""

    @property
    def multiprocessors(self) -> int: ...


class Recorder:
    """A backend without memory: it writes down what it is asked to launch.

    Args:
        like: the backend or device that the launches are for; a driver asks it what that is.
        slots: arrays of the caller.
    """

    name = "recorder"

    def __init__(self, like: Device | None = None, slots: int = 0) -> None:
        self.multiprocessors = 1 if like is None else like.multiprocessors
        self.compute_capability: str | None = getattr(like, "compute_capability", None)
        self.launches: list[Launch] = []
        self.scratch: list[Array] = []
        self._slots = slots

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[Argument],
        stream: int | None = None,
        pdl: bool = False,
    ) -> None:
        """Write the launch down. The stream is that of each run, not this one."""
        self.launches.append(Launch(kernel, grid, shared_bytes, tuple(args), pdl))

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """A stand-in for scratch."""
        slot = self._slots + len(self.scratch)
        array = Array(name, stand_in_address(slot), tuple(shape), contiguous_strides(shape), dtype, "rw")
        self.scratch.append(array)
        return array


def stand_in_address(slot: int) -> int:
    """Where the array of a slot seems to be: at an address that nobody may touch."""
    return (slot + 1) << _SLOT_SHIFT


def slot_and_offset(address: int) -> tuple[int, int]:
    """The slot that an address stands for, and how many bytes into its array."""
    return (address >> _SLOT_SHIFT) - 1, address & ((1 << _SLOT_SHIFT) - 1)


@checked
def record(backend: Device, arrays: Mapping[str, Array], driver: Callable[[Recorder, dict[str, Array]], None]) -> Plan:
    """What ``driver(backend, arrays)`` launches. Slots are in the order of ``arrays``.

    The driver must not look at addresses beyond their being multiples of 16, which stand-ins are.
    """
    recorder = Recorder(backend, len(arrays))
    stand_ins = {
        name: replace(array, pointer=stand_in_address(slot), owner=None)
        for slot, (name, array) in enumerate(arrays.items())
    }
    driver(recorder, stand_ins)
    return Plan(tuple(recorder.launches), tuple(recorder.scratch))


@checked
def replay(plan: Plan, backend: Backend, addresses: Sequence[int], stream: int | None = None) -> None:
    """Launch a plan on the caller's arrays, in the order of slots, and scratch of the backend."""
    scratch = [backend.empty(array.name, array.shape, array.dtype) for array in plan.scratch]
    owners = [None] * len(addresses) + [array.owner for array in scratch]
    memory = list(zip([*addresses, *(array.pointer for array in scratch)], owners, strict=True))
    for launch in plan.launches:
        args = [_bind(arg, memory) for arg in launch.args]
        backend.launch(launch.kernel, launch.grid, launch.shared_bytes, args, stream, launch.pdl)


def _bind(arg: A, memory: Sequence[tuple[int, Any]]) -> A:
    """The argument with the address, and the owner, of the array it stands for."""
    if isinstance(arg, TensorMap):
        return replace(arg, array=_bind(arg.array, memory))
    if not isinstance(arg, Array):
        return arg
    slot, offset = slot_and_offset(arg.pointer)
    address, owner = memory[slot]
    return replace(arg, pointer=address + offset, owner=owner)
