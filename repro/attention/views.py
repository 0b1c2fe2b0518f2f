"""torch tensors as kernels see them: views by address, and copies where a layout does not fit.

Tensors cross by address (``data_ptr``), never through an array library, so bfloat16 needs no
support from one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from analysis.shapes import ROW_ELEMENTS, aligned_head_dim
from kernels.launch import Array
from repro.attention.validation import DTYPES

ALIGNMENT_BYTES = 16

#: Every type that kernels take, masks and scratch included.
NAMES = DTYPES | {
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
}
TORCH_TYPES = {name: dtype for dtype, name in NAMES.items()}


def array_of(name: str, tensor: Tensor) -> Array:
    """The tensor's memory as kernels take it. Dimensions of size 1 have no stride to respect."""
    strides = [s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    strides[-1] = 1
    dtype = NAMES[tensor.dtype]
    return Array(name, tensor.data_ptr(), tuple(tensor.shape), tuple(strides), dtype, "rw", tensor)


def fits(tensor: Tensor) -> bool:
    """Whether kernels can move rows of the tensor 16 bytes at a time where it lies."""
    if tensor.shape[-1] % ROW_ELEMENTS or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        return False
    size = tensor.element_size()
    rows = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0 and all(
        n == 1 or stride * size % ALIGNMENT_BYTES == 0 for n, stride in rows
    )


class Views:
    """Arrays for the tensors of one call, and the bytes of the copies their layouts took.

    copied: (tensor, "read" or "write") -> bytes; a copy reads what it takes and writes all of its
    own memory, padding included.
    """

    def __init__(self) -> None:
        self.copied: dict[tuple[str, str], int] = {}

    def readable(self, name: str, tensor: Tensor) -> Array:
        """The tensor itself, or a padded and aligned copy where kernels cannot read it in place."""
        if fits(tensor):
            return array_of(name, tensor)
        copy = _fresh(tensor)
        copy[..., tensor.shape[-1] :].zero_()
        copy[..., : tensor.shape[-1]].copy_(tensor)
        self._note(name, tensor.numel(), copy.numel(), tensor.element_size())
        return array_of(name, copy)

    @contextmanager
    def written(self, name: str, tensor: Tensor) -> Iterator[Tensor]:
        """The tensor itself, or aligned memory whose content is copied to it at the end."""
        if fits(tensor):
            yield tensor
            return
        fresh = _fresh(tensor)
        yield fresh
        tensor.copy_(fresh[..., : tensor.shape[-1]])
        self._note(name, tensor.numel(), tensor.numel(), tensor.element_size())

    def pairs(self, name: str, tensor: Tensor) -> Array:
        """The tensor itself, read element by element; a copy where its last dimension has gaps."""
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return self.dense(name, tensor)
        return array_of(name, tensor)

    def dense(self, name: str, tensor: Tensor) -> Array:
        """The tensor as an array without gaps."""
        return array_of(name, self.contiguous(name, tensor))

    def contiguous(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor, or a copy without gaps."""
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
            self._note(name, tensor.numel(), tensor.numel(), tensor.element_size())
        return tensor

    def _note(self, name: str, read: int, written: int, size: int) -> None:
        for direction, elements in (("read", read), ("write", written)):
            key = (name, direction)
            self.copied[key] = self.copied.get(key, 0) + elements * size


def _fresh(tensor: Tensor) -> Tensor:
    """Memory of the tensor's shape, rows padded to a multiple of 8 elements."""
    return tensor.new_empty(*tensor.shape[:-1], aligned_head_dim(tensor.shape[-1]))
