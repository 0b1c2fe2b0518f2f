"""Launch this package's kernels as compiled machine code: a backend beside host and GPU.

What runs is the cubin that a card would get, with its descriptors, barriers and tensor maps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.building.compile import compile_cubin
from kernels.host.backend import HostBackend
from kernels.launch import ITEMSIZE, Argument, Array, Kernel, TensorMap, check_grid, contiguous_strides, encode_array
from kernels.launching.driver import tensor_map_geometry
from kernels.machine import tensor_map as machine_map
from kernels.machine.arguments import Struct
from kernels.machine.program import Counts, Program, load


class MachineBackend:
    """Runs compiled kernels by the executor.

    Args:
        architecture: "sm_80", "sm_90" or "sm_90a": what kernels are compiled for.
        options: of :meth:`kernels.machine.program.Program.launch`, as ``products``, ``mufu``.

    Attributes:
        traffic: kernel entry -> {(tensor, direction): bytes}, as the host backend's.
        counts: kernel entry -> what its last launch did.
    """

    name = "machine"
    multiprocessors = HostBackend.multiprocessors

    def __init__(self, architecture: str, **options: Any) -> None:
        self.architecture = architecture
        self.options = options
        self.traffic: dict[str, dict[tuple[str, str], int]] = {}
        self.counts: dict[str, Counts] = {}
        self._programs: dict[bytes, Program] = {}

    def reset(self) -> None:
        """Forget the traffic counted so far."""
        self.traffic = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """Scratch memory that holds NaN, or ones in every bit."""
        elements = int(np.prod(shape, dtype=np.int64))
        memory = np.full(elements * ITEMSIZE[dtype] + 256, 0xFF, np.uint8)
        start = -memory.ctypes.data % 256
        return Array(name, memory.ctypes.data + start, tuple(shape), contiguous_strides(shape), dtype, "rw", memory)

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[Argument],
        stream: int | None = None,
        pdl: bool = False,
    ) -> None:
        """Run a kernel to its end. Errors of ``Program.launch`` and of ``compile_cubin``."""
        check_grid(kernel, grid)
        cubin = compile_cubin(kernel, self.architecture).cubin
        program = self._programs.setdefault(cubin, load(cubin))
        counts = program.launch(
            kernel.entry, grid, kernel.threads, shared_bytes, [_argument(a) for a in args], **self.options
        )
        self.counts[kernel.entry] = counts
        counted = self.traffic.setdefault(kernel.entry, {})
        for (number, direction), traffic in counts.traffic.items():
            argument = args[number]
            array = argument.array if isinstance(argument, TensorMap) else argument
            assert isinstance(array, Array)
            key = (array.name, direction)
            counted[key] = counted.get(key, 0) + traffic.nbytes


def _bytes_of(array: Array) -> np.ndarray:
    """The memory of an array, writable only if its access says so."""
    kind = ctypes.c_uint8 * array.extent_bytes
    memory = np.ctypeslib.as_array(kind.from_address(array.pointer))
    memory.flags.writeable = array.access != "r"
    return memory


def _argument(argument: Argument) -> Any:
    if isinstance(argument, TensorMap):
        return _tensor_map(argument)
    if not isinstance(argument, Array):
        return argument
    if argument.size == 0:
        return Struct((None, *(np.uint64(s) for s in argument.strides[:-1])))
    rest = np.frombuffer(encode_array(argument)[8:], dtype=np.uint64)
    return Struct((_bytes_of(argument), *rest))


def _tensor_map(given: TensorMap) -> machine_map.TensorMap:
    array = given.array
    sizes, strides, box = tensor_map_geometry(array.shape, array.strides, array.itemsize, given.box_rows, given.longest)
    memory = _bytes_of(array).view(f"u{array.itemsize}")
    before = 0 if given.longest is None else given.longest * strides[0]
    return machine_map.TensorMap(memory, sizes, strides, box, swizzle=128, offset=-before)
