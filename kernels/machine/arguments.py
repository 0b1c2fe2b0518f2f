"""A launch's arguments: where arrays lie in the kernel's addresses, and the constant bank."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.machine.elf import FIRST_PARAMETER, Cubin, Entry
from kernels.machine.native import RANGE
from kernels.machine.tensor_map import TensorMap

ROOT_SHIFT = 36
ROOTS = 2000
MODULE = -1  # of a range: a variable of the module, in no count
BANK_BASE = 0x7FFC00000000
"""Generic address of constant bank 0, for tensor maps that are parameters."""
SCALARS = (np.generic, bool)


@dataclass(frozen=True)
class Struct:
    """A parameter passed by value that is made of several values, laid out as C does.

    Args:
        fields: the values, by name where counts of its arrays are wanted by name.
    """

    fields: Sequence[Any] | Mapping[str, Any]

    def named(self) -> list[tuple[str, Any]]:
        """(name, value) in order; without names a field's name is its number."""
        if isinstance(self.fields, Mapping):
            return list(self.fields.items())
        return [(str(number), value) for number, value in enumerate(self.fields)]


class Memory:
    """Addresses of arrays as a kernel sees them.

    An array's memory begins at a multiple of 2^36, so distance to the next is beyond any index;
    views of one array keep their distance from each other.
    """

    def __init__(self) -> None:
        self.roots: list[int] = []
        self.ranges: list[tuple[int, int, int, int, int, int, int]] = []
        self.kept: list[np.ndarray] = []
        self.slots: list[tuple[int, str]] = []
        """Of what is counted: argument and, in a Struct, the field's name."""

    def address(self, array: np.ndarray, argument: int, field: str = "") -> int:
        """Address of element 0, for the argument of that number, or a field of it."""
        base: Any = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        start = base.ctypes.data
        if start not in self.roots:
            self.roots.append(start)
        if len(self.roots) > ROOTS:
            raise ValueError(f"more than {ROOTS} arrays among the arguments")
        root = (self.roots.index(start) + 1) << ROOT_SHIFT
        begin, end = np.lib.array_utils.byte_bounds(array)
        if array.size:
            slot = -1
            if argument != MODULE:
                slot = len(self.slots)
                self.slots.append((argument, field))
            place = (root + begin - start, root + end - start, begin)
            self.ranges.append((*place, argument, slot, int(array.flags.writeable), 0))
        self.kept.append(array)
        return root + array.ctypes.data - start

    def table(self) -> np.ndarray:
        """The ranges for the executor."""
        return np.array(self.ranges, dtype=RANGE) if self.ranges else np.zeros(0, dtype=RANGE)


def packed(value: Any, memory: Memory, argument: int, field: str = "") -> tuple[bytes, int]:
    """Bytes of one argument and its alignment. TypeError names what cannot be passed."""
    if value is None:
        return bytes(8), 8
    if isinstance(value, np.ndarray):
        return struct.pack("<Q", memory.address(value, argument, field)), 8
    if isinstance(value, TensorMap):
        return value.encoded(memory.address(value.array, argument, field)), 64
    if isinstance(value, Struct):
        content, most = b"", 1
        for name, part in value.named():
            data, alignment = packed(part, memory, argument, field or name)
            content += bytes(-len(content) % alignment) + data
            most = max(most, alignment)
        return content + bytes(-len(content) % most), most
    if isinstance(value, SCALARS):
        data = np.asarray(value).tobytes()
        return data, len(data)
    raise TypeError(
        f"argument {argument} is a {type(value).__name__}: give a NumPy array, a NumPy scalar, "
        "None, a TensorMap or a Struct"
    )


def parameter_bytes(entry: Entry, args: Sequence[Any], memory: Memory) -> bytes:
    """The block of parameters. ValueError where the arguments do not match it, naming both."""
    if len(args) != len(entry.parameters):
        sizes = [p.nbytes for p in entry.parameters]
        raise ValueError(f"{entry.name} takes {len(sizes)} arguments of {sizes} bytes, {len(args)} are given")
    total = max((p.offset + p.nbytes for p in entry.parameters), default=0)
    block = bytearray(total)
    for number, (parameter, value) in enumerate(zip(entry.parameters, args, strict=True)):
        data, _ = packed(value, memory, number)
        if len(data) != parameter.nbytes:
            raise ValueError(
                f"{entry.name}: argument {number} has {len(data)} bytes "
                f"({type(value).__name__}), the parameter has {parameter.nbytes}"
            )
        block[parameter.offset : parameter.offset + len(data)] = data
    return bytes(block)


def constant_bank(
    cubin: Cubin,
    entry: Entry,
    parameters: bytes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    local_bytes: int,
) -> np.ndarray:
    """Bank 0: sizes of block and grid, the stack, windows of generic addresses, parameters."""
    first = FIRST_PARAMETER[cubin.architecture]
    bank = np.zeros(max(first + len(parameters), first) + 64, dtype=np.uint8)
    words = dict(enumerate((*block, *grid)))
    words[0x28 // 4] = local_bytes
    for at, value in words.items():
        bank[4 * at : 4 * at + 4] = np.frombuffer(struct.pack("<I", value), dtype=np.uint8)
    windows = {0x18: 0x7FFE00000000, 0x20: 0x7FFD00000000}
    if cubin.architecture == 90:
        windows |= {0x198: BANK_BASE, 0x208: 0}
    for at, address in windows.items():
        bank[at : at + 8] = np.frombuffer(struct.pack("<Q", address), dtype=np.uint8)
    bank[first : first + len(parameters)] = np.frombuffer(parameters, dtype=np.uint8)
    return bank
