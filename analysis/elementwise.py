"""Memory accesses of softmax and of chains of element-wise operations.

A row of softmax and a scale-and-bias move far more bytes than they compute, so their cost is how
often each element crosses to memory: the number of passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Accesses:
    """Memory accesses per element of a row, for rows that do not stay on chip between passes."""

    passes: int
    loads: int
    stores: int

    @property
    def per_element(self) -> int:
        return self.loads + self.stores


SOFTMAX: Mapping[str, Accesses] = MappingProxyType(
    {
        "naive": Accesses(passes=2, loads=2, stores=1),
        "safe": Accesses(passes=3, loads=3, stores=1),
        "online": Accesses(passes=2, loads=2, stores=1),
        "fused": Accesses(passes=1, loads=1, stores=1),
    }
)
"""Milakov & Gimelshein (2018), Alg. 1 (naive), 2 (safe) and 3 (online).

Safe softmax loads each element for the maximum, for the sum and for the result; online softmax
finds maximum and sum in one load. "fused" keeps the row on chip and is what standard attention's
softmax kernel does while a row fits in shared memory.
"""

SOFTMAX_TOPK: Mapping[str, Accesses] = MappingProxyType(
    {
        "safe, then top-k": Accesses(passes=4, loads=4, stores=1),
        "online, then top-k": Accesses(passes=3, loads=3, stores=1),
        "online, fused with top-k": Accesses(passes=1, loads=1, stores=0),
    }
)
"""The same paper, §4 (Alg. 4): the k winners leave, not the row, so no element is stored."""


def softmax_bytes(algorithm: str, rows: int, columns: int, itemsize: int) -> int:
    """Bytes moved by softmax over a (rows, columns) matrix that does not stay on chip."""
    if algorithm not in SOFTMAX:
        raise ValueError(f"algorithm={algorithm!r} is not one of {', '.join(SOFTMAX)}")
    if min(rows, columns, itemsize) < 1:
        raise ValueError(f"rows={rows}, columns={columns}, itemsize={itemsize}: all must be >= 1")
    return SOFTMAX[algorithm].per_element * rows * columns * itemsize


@dataclass(frozen=True)
class Operation:
    """One element-wise operation on a tensor of n elements.

    full_operands: further inputs with n elements (a residual added in).
    broadcast_elements: elements of inputs shared by many (a per-channel scale), read once.
    """

    name: str
    full_operands: int = 0
    broadcast_elements: int = 0


def unfused_bytes(operations: tuple[Operation, ...], elements: int, itemsize: int) -> int:
    """Every operation its own kernel: reads its operands, writes its result."""
    return sum(
        (2 + op.full_operands) * elements * itemsize + op.broadcast_elements * itemsize
        for op in operations
    )


def fused_bytes(operations: tuple[Operation, ...], elements: int, itemsize: int) -> int:
    """One kernel for the chain: what is between two operations stays in a register."""
    if not operations:
        return 0
    return 2 * elements * itemsize + sum(
        op.full_operands * elements * itemsize + op.broadcast_elements * itemsize
        for op in operations
    )


SCALE_AND_BIAS = (Operation("scale"), Operation("bias"))
"""x·scale + bias with two numbers: 4 passes unfused, 2 fused, so exactly twice the bytes."""
