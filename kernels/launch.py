"""Kernels, arrays and backends: what a driver says to launch a kernel.

A :class:`Kernel` names a source file, an entry point and the macros that shape its code. An
:class:`Array` is a view of memory that somebody else owns. A :class:`Backend` launches one on
the other; the two backends are :class:`kernels.host.HostBackend` (any machine, counted and
checked) and :class:`kernels.launching.cupy_backend.CupyBackend` (an NVIDIA GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from analysis.algorithms import ORDERS
from analysis.arguments import check_fields, checked
from analysis.shapes import ITEMSIZE as IO_ITEMSIZE

KERNELS_DIR = Path(__file__).resolve().parent
INCLUDE_DIR = KERNELS_DIR / "include"

ITEMSIZE = {
    **IO_ITEMSIZE,
    "fp64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint32": 4,
    "uint64": 8,
}
"""Bytes of an element of every type that an array can have."""
DTYPE_CODE = {name: code for code, name in enumerate(IO_ITEMSIZE)}
"""Type of q, k, v, out -> the DTYPE macro."""
IoType: TypeAlias = Annotated[str, tuple(IO_ITEMSIZE)]
"""Name of a type of q, k, v, out."""
Count: TypeAlias = Annotated[int, range(1, 2**31)]
"""How many there are of something that a kernel counts in 32 bits."""
Size: TypeAlias = Annotated[int, range(2**31)]
"""The same of something that there may be none of."""
Word: TypeAlias = Annotated[int, range(2**64)]
"""A seed, an address, a stream's handle."""
Order: TypeAlias = Annotated[str, ORDERS]
"""How a pass walks its keys or queries (``analysis.algorithms.check_order``)."""
Pass: TypeAlias = Annotated[str, ("forward", "backward")]
NUMPY_TYPES = {
    "fp16": np.float16,
    "bf16": np.uint16,
    "fp32": np.float32,
    "fp64": np.float64,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint32": np.uint32,
    "uint64": np.uint64,
}
"""What holds a type in NumPy, which has no bf16: its bits."""
ACCESS = ("r", "w", "rw", "atomic")
SCALARS = (np.int32, np.int64, np.uint32, np.uint64, np.float32)
GRID_LIMIT = (2**31 - 1, 65535, 65535)
THREAD_LIMIT = 1024

Argument: TypeAlias = "Array | TensorMap | np.generic"


@dataclass(frozen=True)
class Kernel:
    """An entry point of a CUDA source, specialised by macros.

    Args:
        source: file name in this folder (``"flash_forward.cu"``), or the source text itself if
            it contains a line break (tests write small faulty kernels that way).
        entry: name of the ``extern "C" __global__`` function.
        macros: ``-D`` constants as (name, value) pairs; the order does not matter.
        threads: threads a block, a multiple of 32, at most 1024.
        config: the form that it was made from, which has at least a ``tile`` and a ``head_dim``,
            the columns of a tile; None for kernels without tiles.
    """

    source: str
    entry: str
    macros: tuple[tuple[str, int], ...]
    threads: int
    config: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.threads <= THREAD_LIMIT or self.threads % 32:
            raise ValueError(
                f"{self.entry}: threads must be a multiple of 32 in 32..{THREAD_LIMIT}, not {self.threads}"
            )
        names = [name for name, _ in self.macros]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.entry}: a macro is given twice: {sorted(names)}")
        object.__setattr__(self, "macros", tuple(sorted((name, int(value)) for name, value in self.macros)))

    @property
    def path(self) -> Path | None:
        """The source file, or None when ``source`` is the text itself."""
        return None if "\n" in self.source else KERNELS_DIR / self.source

    def text(self) -> str:
        """The source text. FileNotFoundError names the file."""
        return self.source if self.path is None else self.path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Array:
    """A view of host or device memory owned elsewhere.

    Args:
        name: counter name: ``"q"``, ``"k"``, ``"out"``, …
        pointer: address of element 0.
        shape: e.g. (B, H, N, D) or (B, H, N).
        strides: in elements, non-negative; the last dimension is contiguous (stride 1).
        dtype: one of ``ITEMSIZE``.
        access: ``"r"``, ``"w"`` (every element is written by the launch), ``"rw"`` or
            ``"atomic"``.
        owner: keeps the memory alive.
    """

    name: str
    pointer: Word
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    access: str
    owner: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype not in ITEMSIZE:
            raise TypeError(f"{self.name}: dtype {self.dtype!r} is not one of {list(ITEMSIZE)}")
        if self.access not in ACCESS:
            raise ValueError(f"{self.name}: access {self.access!r} is not one of {ACCESS}")
        if len(self.shape) != len(self.strides):
            raise ValueError(f"{self.name}: shape {self.shape} but strides {self.strides}")
        if min(self.shape, default=0) < 0 or min(self.strides, default=0) < 0:
            raise ValueError(f"{self.name}: shape {self.shape} and strides {self.strides} must not be negative")
        if self.shape and self.shape[-1] > 1 and self.strides[-1] != 1:
            raise ValueError(f"{self.name}: the last dimension has stride {self.strides[-1]}, not 1")
        if self.pointer % self.itemsize:
            raise ValueError(f"{self.name}: address {self.pointer:#x} is not a multiple of {self.itemsize} bytes")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def extent_bytes(self) -> int:
        """Bytes from element 0 to the end of the last element of the view."""
        if self.size == 0:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize

    def with_access(self, access: str, name: str | None = None) -> Array:
        """The same memory for another role."""
        return Array(
            self.name if name is None else name, self.pointer, self.shape, self.strides, self.dtype, access, self.owner
        )


#: Bytes of a tensor map, on the GPU and on the host.
TENSOR_MAP_BYTES = 128
#: A swizzled row of a TMA box is 128 bytes wide.
TENSOR_MAP_ROW_BYTES = 128


@dataclass(frozen=True)
class TensorMap:
    """How TMA sees a (B, H, N, D) array: boxes of ``box_rows`` rows, all D columns at once.

    A box lands in shared memory as D·itemsize / 128 slabs of ``box_rows`` rows of 128 bytes, with
    the 128-byte swizzle. Rows past N read as zero and are not written. The kernel's coordinates
    are (0, row, 0, head, batch).

    Raises ValueError for what the hardware cannot take, naming the value.
    """

    array: Array
    box_rows: int
    longest: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        array = self.array
        if len(array.shape) != 4:
            raise ValueError(f"{array.name}: a tensor map needs 4 dimensions, not {array.shape}")
        if self.longest is not None and (array.shape[0] != 1 or not 1 <= self.longest <= array.shape[2]):
            raise ValueError(
                f"{array.name}: longest={self.longest} of sequences in {array.shape[0]} items of "
                f"{array.shape[2]} rows; it is 1 at least, and they lie in one item"
            )
        if not 1 <= self.box_rows <= 256:
            raise ValueError(f"{array.name}: box_rows={self.box_rows} is outside 1..256")
        row_bytes = array.shape[-1] * array.itemsize
        if row_bytes % TENSOR_MAP_ROW_BYTES:
            raise ValueError(f"{array.name}: rows of {row_bytes} bytes are no multiple of {TENSOR_MAP_ROW_BYTES}")
        strides = [stride * array.itemsize for stride in array.strides]
        unaligned = [s for n, s in zip(array.shape[:-1], strides[:-1], strict=True) if n > 1 and s % 16]
        if array.pointer % 16 or unaligned:
            raise ValueError(
                f"{array.name}: address {array.pointer:#x} and strides {strides} bytes must be multiples of 16"
            )


@runtime_checkable
class Backend(Protocol):
    """Launches kernels on arrays of one kind of memory."""

    name: str
    #: How many blocks of persistent kernels are launched: one for each.
    multiprocessors: int

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[Argument],
        stream: int | None = None,
        pdl: bool = False,
    ) -> None:
        """Run ``kernel`` over ``grid`` blocks with ``shared_bytes`` of dynamic shared memory.

        pdl: the kernel may start before the one before it in the stream has ended; it
        waits itself (``previous_kernel_wait``) before it touches what that one writes.
        """
        ...

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """Uninitialised contiguous scratch memory, access ``"rw"``."""
        ...


@checked
def from_numpy(name: str, values: np.ndarray, access: str, dtype: str | None = None, owner: Any = None) -> Array:
    """A NumPy array as an :class:`Array`. bf16 values are uint16 bits with ``dtype="bf16"``."""
    names = {np.dtype(kind).name: name for name, kind in NUMPY_TYPES.items()} | {"bool": "uint8"}
    found = names.get(values.dtype.name)
    dtype = found if dtype is None else dtype
    if dtype is None or ITEMSIZE.get(dtype) != values.itemsize:
        known = "" if dtype else f", only those of {', '.join(names)}"
        raise TypeError(f"{name}: a NumPy array of {values.dtype} cannot be passed as {dtype}{known}")
    if access != "r" and not values.flags.writeable:
        raise ValueError(f"{name}: access {access!r} of a read-only NumPy array")
    return Array(
        name,
        values.ctypes.data,
        values.shape,
        tuple(s // values.itemsize for s in values.strides),
        dtype,
        access,
        values if owner is None else owner,
    )


@checked
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a dense row-major array."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def encode_array(array: Array, pointer: int | None = None) -> bytes:
    """An array as the kernel receives it by value.

    Tensor4 (32 bytes) for 4 dimensions, Tensor3 (24) for 3, Tensor1 (8) for fewer; see
    ``include/types.cuh``. ``pointer`` replaces the address (the host backend moves the data).
    """
    fields = [array.pointer if pointer is None else pointer]
    ndim = len(array.shape)
    if ndim > 4:
        raise ValueError(f"{array.name}: {ndim} dimensions, kernels take at most 4")
    if ndim >= 3:
        # The innermost stride is 1 and not passed.
        fields += array.strides[: ndim - 1]
    return np.array(fields, dtype=np.uint64).tobytes()


def encode_tensor_map(tensor_map: TensorMap, pointer: int | None = None) -> bytes:
    """A tensor map as the host backend reads it (``host/hopper.hpp``): pointer, sizes, strides.

    Sixteen 64-bit words: address, itemsize, D, N, H, B, strides of N, H, B in bytes, box rows,
    bytes from where the map begins to the address, 0…
    """
    array, before = tensor_map.array, 0
    batch, heads, rows, columns = array.shape
    stride_b, stride_h, stride_n = (s * array.itemsize for s in array.strides[:3])
    if tensor_map.longest is not None:
        batch, rows, stride_b = rows + 1, tensor_map.longest, stride_n
        before = rows * stride_n
    words = [array.pointer if pointer is None else pointer, array.itemsize]
    words += [columns, rows, heads, batch, stride_n, stride_h, stride_b, tensor_map.box_rows]
    words.append(before)
    words += [0] * (TENSOR_MAP_BYTES // 8 - len(words))
    return np.array(words, dtype=np.uint64).tobytes()


def encode_scalar(value: np.generic) -> bytes:
    """A scalar as the kernel receives it. Python numbers are refused: their width is a guess."""
    if not isinstance(value, SCALARS):
        names = [t.__name__ for t in SCALARS]
        raise TypeError(f"kernel argument {value!r} of type {type(value).__name__}: give one of {names}")
    return value.tobytes()


def encode(arg: Argument) -> bytes:
    """Bytes of one kernel argument."""
    if isinstance(arg, TensorMap):
        return encode_tensor_map(arg)
    return encode_array(arg) if isinstance(arg, Array) else encode_scalar(arg)


@checked
def check_grid(kernel: Kernel, grid: tuple[int, int, int]) -> None:
    """ValueError when a grid axis is empty or above the hardware's limit."""
    for axis, size, limit in zip("xyz", grid, GRID_LIMIT, strict=True):
        if not 0 < size <= limit:
            raise ValueError(f"{kernel.entry}: grid.{axis} = {size} is outside 1..{limit}")
