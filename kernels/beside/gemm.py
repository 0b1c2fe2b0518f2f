"""Launch the matrix products ``gemm_*.cu``: the tiling ladder, from no tile to tensor cores.

A (M, K), B (K, N) and C (M, N) are dense, row-major, of one type; sums are fp32.
"""

from __future__ import annotations

import numpy as np

from analysis.arguments import checked
from analysis.gemm import VARIANTS, GemmTile, shared_tile_bytes, square
from kernels.checks import require_int32
from kernels.ladder_arrays import flat_grid, require_fit
from kernels.launch import DTYPE_CODE, Argument, Array, Backend, Kernel, Word, contiguous_strides

NAIVE_THREADS = 256
SHARED_LIMIT_BYTES = 48 * 1024  # what a block may have on every GPU without asking

#: Tiles that suit every supported GPU.
DEFAULT_TILES = {
    "tiled": square(16),
    "three-level": GemmTile(64, 64, 16, 32, 32, 8, 4),
    "tensor-core": GemmTile(64, 64, 32, 32, 32),
}


@checked
def gemm_kernel(variant: str, dtype: str, tile: GemmTile | None = None) -> Kernel:
    """The kernel of one step of the ladder.

    Raises ValueError for a tile that does not divide into warp and thread tiles, or a type that the
    step does not take.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {VARIANTS}, got {variant!r}")
    if dtype not in DTYPE_CODE:
        raise ValueError(f"dtype must be one of {sorted(DTYPE_CODE)}, got {dtype!r}")
    macros: dict[str, int] = {"DTYPE": DTYPE_CODE[dtype]}
    if variant == "naive":
        macros["THREADS"] = threads = NAIVE_THREADS
        return Kernel("beside/gemm_naive.cu", "gemm_naive", tuple(macros.items()), threads)
    tile = tile or DEFAULT_TILES[variant]
    if variant == "tiled":
        if tile not in (square(8), square(16), square(32)):
            raise ValueError(f"a tiled product takes square tiles of 8, 16 or 32, got {tile}")
        macros["TILE"] = tile.block_m
        return Kernel("beside/gemm_tiled.cu", "gemm_tiled", tuple(macros.items()), tile.block_m**2)
    names = ["BLOCK_M", "BLOCK_N", "BLOCK_K", "WARP_M", "WARP_N"]
    if variant == "three-level":
        names += ["THREAD_M", "THREAD_N"]
    sizes = {name: getattr(tile, name.lower()) for name in names}
    if min(sizes.values()) < 1 or tile.block_m % tile.warp_m or tile.block_n % tile.warp_n:
        raise ValueError(f"{variant}: {tile} is not made of whole warp tiles")
    if variant == "three-level":
        lanes = (tile.warp_m // tile.thread_m) * (tile.warp_n // tile.thread_n)
        if tile.warp_m % tile.thread_m or tile.warp_n % tile.thread_n or lanes != 32:
            raise ValueError(f"a warp tile of {tile} is not 32 thread tiles")
    else:
        if dtype == "fp32":
            raise ValueError("the tensor-core product takes fp16 or bf16, got 'fp32'")
        if any(size % 16 for size in sizes.values()):
            raise ValueError(f"tensor-core tiles are multiples of 16, got {tile}")
    entry = f"gemm_{variant.replace('-', '_')}"
    return Kernel(f"beside/{entry}.cu", entry, tuple((macros | sizes).items()), tile.warps * 32)


def all_kernels() -> list[Kernel]:
    """Every step with its default tile, for compile tests and ahead-of-time builds."""
    return [
        gemm_kernel(variant, dtype)
        for variant in VARIANTS
        for dtype in DTYPE_CODE
        if (variant, dtype) != ("tensor-core", "fp32")
    ]


@checked
def gemm(
    backend: Backend,
    variant: str,
    a: Array,
    b: Array,
    c: Array,
    tile: GemmTile | None = None,
    stream: Word | None = None,
) -> None:
    """C = A B by one step of the ladder.

    Raises ValueError, naming both values, for shapes, types or tiles that do not fit.
    """
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {a.shape} and b {b.shape} cannot be multiplied")
    require_int32("a", a.shape)
    require_int32("b", b.shape)
    (m, k), n = a.shape, b.shape[1]
    if c.shape != (m, n):
        raise ValueError(f"c is {c.shape}, the product is {(m, n)}")
    if min(m, n, k) < 1:
        raise ValueError(f"a {a.shape} and b {b.shape} must not be empty")
    for array in (a, b, c):
        if array.dtype != a.dtype:
            raise ValueError(f"{array.name} is {array.dtype}, {a.name} is {a.dtype}")
        if array.strides != contiguous_strides(array.shape):
            raise ValueError(f"{array.name}: strides {array.strides} are not contiguous")
    kernel = gemm_kernel(variant, a.dtype, tile)
    arguments: list[Argument] = [
        *(x.with_access("r", name) for x, name in ((a, "a"), (b, "b"))),
        c.with_access("w", "c"),
        np.int32(m),
        np.int32(n),
        np.int32(k),
    ]
    if variant == "naive":
        backend.launch(kernel, flat_grid(-(-m * n // NAIVE_THREADS)), 0, arguments, stream)
        return
    tile = tile or DEFAULT_TILES[variant]
    if variant == "tensor-core" and (k % 8 or n % 8):
        raise ValueError(f"the tensor-core product needs k and n in multiples of 8, got {k}, {n}")
    shared = shared_tile_bytes(variant, tile, a.dtype)
    require_fit(f"{variant} tile {tile}", shared, SHARED_LIMIT_BYTES)
    blocks = -(-m // tile.block_m) * -(-n // tile.block_n)
    backend.launch(kernel, flat_grid(blocks), shared, arguments, stream)
