"""What the drivers of the first ladder steps share: checks, grids, scratch.

Errors come before any launch and name both values that disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from analysis.shapes import Tile
from kernels.checks import require_int32
from kernels.launch import DTYPE_CODE, GRID_LIMIT, ITEMSIZE, Array, Backend

MAX_HEAD_DIM = 128
VECTOR_BYTES = 16


class LadderForm(NamedTuple):
    """What a kernel of the first steps is cut to; ``head_dim`` as it is, nothing is padded."""

    tile: Tile
    head_dim: int


def pad4(rows: int) -> int:
    """Rows that a tile occupies in shared memory (``ladder.cuh``)."""
    return -(-rows // 4) * 4


def row_bytes(head_dim: int, dtype: str) -> int:
    """Distance of two rows of a tile in shared memory: an odd number of 16-byte chunks."""
    return (head_dim * ITEMSIZE[dtype] // VECTOR_BYTES | 1) * VECTOR_BYTES


def require_fit(what: str, needed_bytes: int, limit_bytes: int) -> None:
    """ValueError with both numbers when a block needs more shared memory than it may have."""
    if needed_bytes > limit_bytes:
        raise ValueError(f"{what} needs {needed_bytes} bytes of shared memory, the limit is {limit_bytes}")


def require_arrays(q: Array, k: Array, others: Sequence[tuple[Array, Array]]) -> None:
    """q and k are a problem these kernels can run; ``others`` pairs an array with its model.

    Raises:
        ValueError: shapes disagree, head_dim is not a multiple of 8 up to 128, or a row does not
            start at a multiple of 16 bytes.
        TypeError: the types differ or are not fp16, bf16 or fp32.
    """
    if len(q.shape) != 4 or len(k.shape) != 4:
        raise ValueError(f"q {q.shape} and k {k.shape} must be (B, H, N, D)")
    require_int32("q", q.shape)
    require_int32("k", k.shape)
    batch, heads, _, head_dim = q.shape
    if q.dtype not in DTYPE_CODE:
        raise TypeError(f"q is {q.dtype}, not one of {', '.join(DTYPE_CODE)}")
    if k.shape[:2] != (batch, heads) or k.shape[3] != head_dim:
        raise ValueError(
            f"q {q.shape} and k {k.shape} must agree in B, H and D: these kernels have one "
            "key/value head per query head"
        )
    if min(*q.shape, *k.shape) < 1:
        raise ValueError(f"q {q.shape} and k {k.shape} must not be empty")
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is not a multiple of 8 up to the limit of {MAX_HEAD_DIM}")
    for array, like in ((q, q), (k, k), *others):
        if array.shape != like.shape:
            raise ValueError(f"{array.name} is {array.shape}, {like.name} is {like.shape}")
        if array.dtype != q.dtype:
            raise TypeError(f"{array.name} is {array.dtype}, q is {q.dtype}")
        rows = zip(array.shape[:-1], array.strides[:-1], strict=True)
        offsets = [array.pointer, *(s * array.itemsize for n, s in rows if n > 1)]
        if any(offset % VECTOR_BYTES for offset in offsets):
            raise ValueError(
                f"{array.name}: rows must start at multiples of {VECTOR_BYTES} bytes, strides are "
                f"{array.strides} elements of {array.itemsize} bytes from {array.pointer:#x}"
            )


def roles(access: str, **arrays: Array) -> list[Array]:
    """The arrays under the names their bytes are counted by, with what a launch may do to them."""
    return [array.with_access(access, name) for name, array in arrays.items()]


def flat_grid(blocks: int) -> tuple[int, int, int]:
    """All blocks along x, the one axis that may be long."""
    if blocks > GRID_LIMIT[0]:
        raise ValueError(f"{blocks} blocks, a grid holds at most {GRID_LIMIT[0]}")
    return blocks, 1, 1


def score_matrix(backend: Backend, name: str, q: Array, seqlen_k: int) -> Array:
    """Scratch (B, H, Nq, Nk) in the io type, rows starting at multiples of 16 bytes."""
    batch, heads, seqlen_q, _ = q.shape
    padded = -(-seqlen_k // 8) * 8
    memory = backend.empty(name, (batch, heads, seqlen_q, padded), q.dtype)
    shape = (batch, heads, seqlen_q, seqlen_k)
    return Array(name, memory.pointer, shape, memory.strides, q.dtype, "rw", memory.owner)


def row_statistic(backend: Backend, stats: dict[str, Array], name: str, q: Array) -> Array:
    """``stats[name]``, (B, H, Nq) in fp32: the caller's memory, or scratch put there."""
    array = stats.setdefault(name, backend.empty(name, q.shape[:3], "fp32"))
    _require_stat(array, name, q.shape[:3], "fp32")
    return array


def saved(stats: dict[str, Array], name: str, algorithm: str, shape: tuple[int, ...], dtype: str) -> Array:
    """What the forward pass left for the backward pass; ValueError if it is not there."""
    if name not in stats:
        raise ValueError(f"{algorithm} backward needs {name!r} of its forward pass, stats has {sorted(stats)}")
    _require_stat(stats[name], name, shape, dtype)
    return stats[name]


def _require_stat(array: Array, name: str, shape: tuple[int, ...], dtype: str) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"stats[{name!r}] is {array.shape} {array.dtype}, not {shape} {dtype}")
