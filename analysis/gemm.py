"""Bytes a matrix product moves at each level of the memory hierarchy, per tiling, and lower bounds.

C (M, N) = A (M, K) B (K, N). Four forms, each a step of the ladder in ``kernels/gemm_*.cu``:

    naive         no tile: every multiply-add reads both operands from global memory
    tiled         square tiles in shared memory, one result a thread
    three-level   block tile in shared memory, warp tile, thread tile in registers
    tensor-core   block tile in shared memory, warp tile in mma fragments

"global" is the SM boundary, "shared" what the threads read from and write to shared memory. All
counts are exact, ragged edges included, and equal the counters of the host backend.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.lower_bounds import matmul_accesses_rectangular
from analysis.shapes import ITEMSIZE

VARIANTS = ("naive", "tiled", "three-level", "tensor-core")


@dataclass(frozen=True)
class GemmShape:
    """C (m, n) = A (m, k) B (k, n)."""

    m: int
    n: int
    k: int
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 1:
            raise ValueError(f"sizes must be positive: {self.m} x {self.n} x {self.k}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype must be one of {sorted(ITEMSIZE)}, got {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class GemmTile:
    """Rows, columns and depth of a block's tile; rows and columns of a warp's and a thread's."""

    block_m: int
    block_n: int
    block_k: int
    warp_m: int = 0
    warp_n: int = 0
    thread_m: int = 0
    thread_n: int = 0

    @property
    def warps(self) -> int:
        """Warps of a block (three-level and tensor-core)."""
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n)


def square(side: int) -> GemmTile:
    """The tile of the "tiled" form."""
    return GemmTile(side, side, side)


@dataclass(frozen=True)
class GemmTraffic:
    """Bytes by tensor at the SM boundary, and by direction in shared memory."""

    a_read: int
    b_read: int
    c_write: int
    shared_read: int
    shared_write: int

    @property
    def global_bytes(self) -> int:
        """All bytes across the SM boundary."""
        return self.a_read + self.b_read + self.c_write

    @property
    def shared_bytes(self) -> int:
        """All bytes in and out of shared memory."""
        return self.shared_read + self.shared_write


def predict_gemm(variant: str, shape: GemmShape, tile: GemmTile | None = None) -> GemmTraffic:
    """Exact bytes of one product. ``tile`` is needed by all forms but the naive one."""
    m, n, k, e = shape.m, shape.n, shape.k, shape.itemsize
    if variant == "naive":
        return GemmTraffic(m * n * k * e, m * n * k * e, m * n * e, 0, 0)
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
    if tile is None:
        raise ValueError(f"the {variant} product needs a tile")
    rows, cols = -(-m // tile.block_m), -(-n // tile.block_n)
    steps = rows * cols * -(-k // tile.block_k)  # block tiles multiplied, all blocks together
    a_read, b_read = m * k * e * cols, k * n * e * rows
    stored = (tile.block_m + tile.block_n) * tile.block_k * e  # zero padding included
    if variant == "tiled":
        loaded = tile.block_m * tile.block_n * 2 * tile.block_k * e
        return GemmTraffic(a_read, b_read, m * n * e, steps * loaded, steps * stored)
    if variant == "three-level":
        # each thread reads a column of its rows of A and a row of its columns of B per k
        loaded = tile.warps * 32 * tile.block_k * (tile.thread_m + tile.thread_n) * e
        return GemmTraffic(a_read, b_read, m * n * e, steps * loaded, steps * stored)
    loaded = tile.warps * tile.block_k * (tile.warp_m + tile.warp_n) * e
    staged = rows * cols * tile.block_m * tile.block_n * e  # the result on its way out
    return GemmTraffic(a_read, b_read, m * n * e, steps * loaded + m * n * e, steps * stored + staged)


def lower_bound_bytes(shape: GemmShape, fast_elements: float) -> float:
    """Least bytes between a fast memory of ``fast_elements`` and the slow one: 2MNK/√S elements.

    Red-blue pebble game (Hong & Kung 1981; constant 2 and tight: Kwasniewski et al. 2019), never
    below reading both operands and writing the result once.
    """
    if fast_elements < 1:
        raise ValueError(f"a fast memory of {fast_elements} elements holds nothing")
    m, n, k = shape.m, shape.n, shape.k
    return matmul_accesses_rectangular(m, n, k, fast_elements) * shape.itemsize


def fast_elements(variant: str, tile: GemmTile | None = None) -> int:
    """Elements a block keeps close (accumulators and both tiles): S in the bound at its level."""
    if variant == "naive" or tile is None:
        return 3  # one of A, B and C a thread
    return tile.block_m * tile.block_n + (tile.block_m + tile.block_n) * tile.block_k


def shared_tile_bytes(variant: str, tile: GemmTile, dtype: str) -> int:
    """Dynamic shared memory of a block."""
    stage = (tile.block_m + tile.block_n) * tile.block_k * ITEMSIZE[dtype]
    if variant == "tensor-core":  # two stages; the result is staged in the same place
        return max(2 * stage, tile.block_m * tile.block_n * ITEMSIZE[dtype])
    return stage
