"""Numbers by which a repeated run of a stage shows that it gave the same bits as the first.

Of every tensor a hash over all its elements and their places, in one pass where the tensor lies: on
the CPU xxHash (XXH3, 64 bits) over the memory itself, elsewhere a sum of all 32-bit words times
fixed random 64-bit numbers, modulo 2^64, which stays on the device.  Either misses a difference
with a chance of about 2^-32 or less.  Two kinds of tensors need no pass: a trained parameter, of
which the graph holds the very object, and the stage's own input, which is compared where it is
made.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from .stage_parts import modules_of
from .values import version

#: Words of one step on a device: its products take twice the bytes of the words.
STEP_WORDS = 2**20
#: Bytes of a piece that is copied where elements do not lie side by side.
PIECE_BYTES = 2**16

#: Shape, type, and what tells the elements.
Print = tuple[torch.Size, torch.dtype, object]


class Prints:
    """Fingerprints of what one run of a stage saves, in order."""

    def __init__(self, inputs: Iterable[Tensor], stage: Any = None) -> None:
        self._stage = stage
        self.found: list[Print] = []
        self._inputs: dict[int, tuple[int, Tensor]] = {}
        for number, tensor in enumerate(inputs):
            if _is_plain(tensor):
                self._inputs[tensor.untyped_storage()._cdata] = number, tensor
        self._known: dict[int, tuple[weakref.ref[Tensor], int | None, Print]] = {}

    @torch.compiler.disable  # a compiled stage saves tensors too
    def add(self, tensors: Iterable[Tensor]) -> None:
        self.found += [
            (tensor.shape, tensor.dtype, None) if self._is_workspace(tensor) else self._of(tensor) for tensor in tensors
        ]

    def _is_workspace(self, tensor: Tensor) -> bool:
        """Bytes of a library's recurrent layer, between which it leaves some that nobody wrote."""
        return (
            tensor.dtype is torch.uint8
            and tensor.dim() == 1
            and self._stage is not None
            and any(isinstance(m, nn.RNNBase) for r in modules_of(self._stage) for m in r.modules())
        )

    def results(self, tensors: Iterable[Tensor]) -> Prints:
        """Those of the run's results.  The tensors themselves are forgotten."""
        found = Prints(())
        found.found = [self._of(tensor) for tensor in tensors]
        self._inputs, self._known = {}, {}
        return found

    def _of(self, tensor: Tensor) -> Print:
        earlier = self._known.get(id(tensor))
        if earlier is not None and earlier[0]() is tensor and earlier[1] == version(tensor):
            return earlier[2]
        found = tensor.shape, tensor.dtype, self._elements(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), version(tensor), found
        return found

    def _elements(self, tensor: Tensor) -> object:
        if not _is_plain(tensor):
            return tuple(elements(part) for part in _parts(tensor))
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) and base.requires_grad:
            where = tensor.storage_offset(), tensor.stride()
            return "parameter", id(base), base._version, where
        storage = tensor.untyped_storage()._cdata
        if storage in self._inputs:
            number, given = self._inputs[storage]
            offset = tensor.data_ptr() - given.data_ptr()
            if offset >= 0 and offset + _extent(tensor) <= _extent(given):
                return "input", number, offset, tensor.stride()
        return elements(tensor)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if not tensor.numel():
        return 0
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """The dense tensors that another kind of tensor consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()] if tensor.layout is not torch.strided else [tensor.as_subclass(Tensor)]


def elements(tensor: Tensor) -> object:
    """The hash of all elements in their places; a tensor of one number on another device."""
    if not _is_plain(tensor):
        return tuple(elements(part) for part in _parts(tensor))
    bits = tensor.detach()
    if bits.is_cpu and bits.is_contiguous() and not bits.is_conj() and not bits.is_neg():
        return xxhash.xxh3_64_intdigest(_memory(bits))
    flags = bits.is_conj(), bits.is_neg()
    bits = bits.conj() if flags[0] else bits  # both are views of the memory as it is
    bits = torch._neg_view(bits) if flags[1] else bits
    for dimension, (size, stride) in enumerate(zip(bits.shape, bits.stride(), strict=True)):
        if size > 1 and stride == 0:  # the same elements again and again
            bits = bits.narrow(dimension, 0, 1)
    steps = bits.stride()
    bits = bits.permute(sorted(range(bits.dim()), key=lambda d: (-steps[d], d)))
    return flags, tensor.stride(), _of_host(bits) if bits.is_cpu else _of_device(bits)


def _of_host(bits: Tensor) -> int:
    if bits.is_contiguous():
        return xxhash.xxh3_64_intdigest(_memory(bits))
    state = xxhash.xxh3_64()
    for piece in _pieces(bits):
        copied = piece.contiguous()  # named, so that it is there while its memory is read
        state.update(_memory(copied))
    return state.intdigest()


def _memory(bits: Tensor) -> memoryview:
    """Where it lies: Tensor.numpy() would forbid moving the tensor away later."""
    return memoryview((ctypes.c_char * bits.nbytes).from_address(bits.data_ptr()))


def _pieces(bits: Tensor) -> Iterator[Tensor]:
    """Parts of PIECE_BYTES at most, in order: a copy of each, but never of the whole."""
    inner, size = bits.dim(), bits.element_size()
    while inner and size * bits.shape[inner - 1] <= PIECE_BYTES:
        inner -= 1
        size *= bits.shape[inner]
    if inner:
        rows = max(1, PIECE_BYTES // size)
        for index in product(*(range(n) for n in bits.shape[: inner - 1])):
            yield from bits[index].split(rows)
    else:
        yield bits


@cache
def _weights(device: torch.device) -> Tensor:
    """Fixed odd numbers, so that one element that differs always shows."""
    generator = torch.Generator().manual_seed(2022)
    numbers = torch.randint(-(2**62), 2**62, (STEP_WORDS,), generator=generator)
    return (numbers * 2 + 1).to(device)


def _of_device(bits: Tensor) -> Tensor:
    if bits.is_complex():
        bits = torch.view_as_real(bits)
    weights = _weights(bits.device)
    pieces = [bits] if bits.is_contiguous() else _pieces(bits)
    sums = [
        (step * weights[: step.numel()]).sum()
        for piece in pieces
        for step in _words(piece.contiguous().view(-1)).split(STEP_WORDS)
    ]
    while len(sums) > 1:
        sums = [
            (torch.stack(sums[i : i + STEP_WORDS]) * weights[: len(sums[i : i + STEP_WORDS])]).sum()
            for i in range(0, len(sums), STEP_WORDS)
        ]
    return sums[0] if sums else torch.zeros((), dtype=torch.int64, device=bits.device)


def _words(flat: Tensor) -> Tensor:
    """The bits as whole numbers of 32, or of 16 or 8 where they are no multiple of it."""
    for kind in (torch.int32, torch.int16, torch.uint8):
        size = kind.itemsize
        if flat.nbytes % size == 0 and flat.storage_offset() * flat.element_size() % size == 0:
            return flat.view(kind)
    raise AssertionError("every tensor is bytes")


def difference(first: Prints, second: Prints) -> tuple[str, Tensor | None]:
    """How a repeated run differs, "" if not; and where only a device knows, whether all is equal
    there, as a tensor."""
    waiting: list[Tensor] = []
    if len(first.found) != len(second.found):
        return f"{len(second.found)} tensors where it gave {len(first.found)} at first", None
    for (shape, dtype, told), (again, other, tells) in zip(first.found, second.found, strict=True):
        if (shape, dtype) != (again, other):
            return (f"a tensor {tuple(again)} of {other} where it was {tuple(shape)} of {dtype}", None)
        if not _same(told, tells, waiting):
            return f"other values in a tensor {tuple(shape)} of {dtype}", None
    if not waiting:
        return "", None
    return "", torch.stack([equal.to(waiting[0].device) for equal in waiting]).all()


def _same(one: object, other: object, waiting: list[Tensor]) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        waiting.append(one == other)
        return True
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(_same(a, b, waiting) for a, b in zip(one, other, strict=True))
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other
