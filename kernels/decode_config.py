"""The compiled forms of ``flash_decode.cu`` and ``flash_decode_merge.cu``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from analysis.arguments import check_fields, checked
from analysis.gpu import Gpu
from analysis.hardware import H100_SXM
from analysis.occupancy import Occupancy, occupancy
from analysis.shapes import SCALE_UNIT, Tile
from kernels.flash_config import HEAD_DIMS, OTHER_REGISTERS, SHARED_LIMIT_BYTES, padded_head_dim
from kernels.launch import DTYPE_CODE, ITEMSIZE, Count, Kernel, Size

ROWS = (16, 32, 64)
"""Query rows a tile can have."""
KEYS = (128, 64, 32, 16)
"""Keys a tile can have. One of K is 16 KiB, so that what arrives during the work on another covers
the latency of memory: 96 KiB an SM with three blocks, where 4.8 TB/s times 0.7 µs asks for 25."""
TILE_BYTES = 16 * 1024
WARPS = 4
MERGE_WARPS = 4
"""Rows a block of the merging kernel."""
OPERAND_REGISTERS = 24
"""What a thread keeps beside that of an fp8 tile on its way (addresses, halves of words), or of
operands of fp32, which come one by one and not by ldmatrix."""
PAGE_UNIT = 16
"""Page sizes are multiples of this."""
WIDE, WIDE_VALUES, COLUMN_WARPS = 576, 512, 2
"""Columns of a tile of a wide latent, of the output's, and warps that share out the latter."""
WIDE_TILE_BYTES = 36 * 1024
"""A tile of 32 of its keys."""


def padded_columns(head_dim: int) -> int:
    """Columns of a tile that holds ``head_dim``. ValueError names the limits."""
    if head_dim > WIDE:
        raise ValueError(f"head_dim={head_dim} is above {WIDE}")
    if head_dim <= HEAD_DIMS[-1]:
        return padded_head_dim(head_dim)
    if head_dim % 8:
        raise ValueError(f"head_dim={head_dim} is not a multiple of 8")
    return WIDE


@dataclass(frozen=True)
class DecodeConfig:
    """One compiled form. ``head_dim`` is the padded one."""

    dtype: str
    head_dim: int
    tile: Tile
    causal: bool = True
    seqlens: bool = False
    """Every sequence has a length of its own."""
    paged: bool = False
    fp8: bool = False
    """K and V are e4m3."""
    scale_blocks: bool = False
    """With a scale for a block of keys, instead of a head."""
    latent: bool = False
    """The values are the keys."""
    split: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype not in DTYPE_CODE:
            raise TypeError(f"dtype {self.dtype!r} is not one of {list(DTYPE_CODE)}")
        if self.head_dim not in (*HEAD_DIMS, WIDE):
            raise ValueError(f"padded head_dim={self.head_dim} is not one of {(*HEAD_DIMS, WIDE)}")
        if self.wide and not (self.latent and self.dtype != "fp32"):
            raise ValueError(
                f"head_dim={self.head_dim} is of a latent cache with 16-bit q; here "
                f"latent={self.latent} and q is {self.dtype}"
            )
        if self.tile.block_m not in ROWS or self.tile.block_n not in KEYS:
            raise ValueError(
                f"tile ({self.tile.block_m}, {self.tile.block_n}): block_m is one of {ROWS}, block_n one of {KEYS}"
            )
        if self.scale_blocks and not self.fp8:
            raise ValueError(f"scale_blocks={self.scale_blocks} with fp8={self.fp8}")
        if self.fp8 and self.dtype == "fp32":
            raise ValueError("an fp8 cache is multiplied in 16 bits, q is fp32")

    @property
    def wide(self) -> bool:
        """A latent whose output is shared out over warps by columns."""
        return self.head_dim == WIDE

    @property
    def value_columns(self) -> int:
        """Columns of a tile of the output."""
        return WIDE_VALUES if self.wide else self.head_dim

    @property
    def column_warps(self) -> int:
        """Warps that share out those."""
        return COLUMN_WARPS if self.wide else 1

    @property
    def key_warps(self) -> int:
        """Warps that share out the keys of a tile."""
        others = self.tile.block_m // 16 * self.column_warps
        return max(1, min(WARPS // others, self.tile.block_n // 16))

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * self.tile.block_m // 16 * self.key_warps * self.column_warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as laid out in the source."""
        size, columns = ITEMSIZE[self.dtype], self.head_dim
        warps = self.threads // 32
        stages = 1 if self.fp8 else 2
        tensors = 1 if self.latent else 2
        tiles = tensors * stages * self.tile.block_n * columns * size
        sums = warps * 16 * self.value_columns // self.column_warps * ITEMSIZE["fp32"]
        weights = 0
        if self.dtype == "fp32":
            weights = warps * 16 * self.tile.block_n // self.key_warps * size
        stats = warps * 16 * 8
        pages = 2 * self.tile.block_n // PAGE_UNIT * 16 if self.paged else 0
        words = 16
        scales = 3 * 2 * 4 * self.tile.block_n // SCALE_UNIT if self.scale_blocks else 0
        queries = self.tile.block_m * columns * size
        return queries + max(tiles, sums) + weights + stats + pages + words + scales

    @property
    def registers_per_thread(self) -> int:
        """Estimate: accumulators of the output and the scores, q, fp8 on its way, and the rest."""
        keys = self.tile.block_n // self.key_warps
        columns = self.value_columns // self.column_warps
        found = columns // 2 + keys // 2 + OTHER_REGISTERS
        if self.dtype != "fp32" and self.head_dim <= 128:
            found += self.head_dim // 4
        if self.fp8:
            tensors = 1 if self.latent else 2
            found += tensors * self.tile.block_n * self.head_dim // 4 // self.threads
        if self.fp8 or self.dtype == "fp32":
            found += OPERAND_REGISTERS
        return min(found, 255)

    def fit(self, gpu: Gpu) -> Occupancy:
        """Blocks that an SM holds, by the estimate of the registers."""
        return occupancy(
            gpu, threads=self.threads, registers_per_thread=self.registers_per_thread, shared_bytes=self.shared_bytes
        )

    def blocks_per_sm(self, limit: int = SHARED_LIMIT_BYTES) -> int:
        """Of a card whose blocks may have ``limit`` bytes of shared memory; all that run these
        kernels have 64 K registers and 1 KiB of shared memory more an SM."""
        more = H100_SXM.shared_reserved_per_block
        sm = replace(H100_SXM, shared_bytes_per_sm=limit + more, shared_bytes_per_block=limit)
        return max(1, self.fit(sm).blocks_per_sm)

    @property
    def cache_tile_bytes(self) -> int:
        """What a block reads of K and V for one tile of keys."""
        size = 1 if self.fp8 else ITEMSIZE[self.dtype]
        return (1 if self.latent else 2) * self.tile.block_n * self.head_dim * size

    def partial_bytes(self, rows: int) -> int:
        """What a block writes of out and lse when it has a split, for ``rows`` of its rows."""
        return rows * (self.value_columns + 1) * ITEMSIZE["fp32"]

    def _macros(self) -> dict[str, int]:
        return {
            "DTYPE": DTYPE_CODE[self.dtype],
            "HEAD_DIM": self.head_dim,
            "BLOCK_M": self.tile.block_m,
            "BLOCK_N": self.tile.block_n,
            "WARPS_N": self.key_warps,
            "BLOCKS_PER_SM": self.fit(H100_SXM).blocks_per_sm,
            "CAUSAL": int(self.causal),
            "SEQLENS": int(self.seqlens),
            "PAGED": int(self.paged),
            "FP8": int(self.fp8),
            "SCALE_BLOCKS": int(self.scale_blocks),
            "LATENT": int(self.latent),
            "VALUE_DIM": self.value_columns,
            "COLUMN_WARPS": self.column_warps,
            "SPLIT": int(self.split),
        }

    def kernel(self) -> Kernel:
        """``flash_decode``."""
        macros = tuple(self._macros().items())
        return Kernel("flash_decode.cu", "flash_decode", macros, self.threads)

    def merge_kernel(self) -> Kernel:
        """``flash_decode_merge``, which adds up the splits."""
        named = ("DTYPE", "HEAD_DIM", "SEQLENS")
        macros = {name: value for name, value in self._macros().items() if name in named}
        macros |= {"BLOCK_N": self.tile.block_n, "HEAD_DIM": self.value_columns}
        entry = "flash_decode_merge"
        return Kernel(f"{entry}.cu", entry, tuple(macros.items()), 32 * MERGE_WARPS)


@checked
def configure(
    dtype: str, head_dim: int, rows: Count, *, limit: Size = SHARED_LIMIT_BYTES, **features: bool
) -> DecodeConfig:
    """The form for ``rows`` query rows a key/value head.

    As many rows a tile as there are, up to 64, so that K and V are read once; keys for tiles of
    16 KiB, of a wide latent 36. ValueError with both numbers where nothing fits into ``limit``
    bytes of shared memory.
    """
    padded = padded_columns(head_dim)
    most = WIDE_TILE_BYTES if padded == WIDE else TILE_BYTES
    if dtype not in DTYPE_CODE:
        raise TypeError(f"dtype {dtype!r} is not one of {list(DTYPE_CODE)}")
    wanted = next((size for size in ROWS if size >= rows), ROWS[-1])
    smallest = 0
    for block_n in KEYS:
        # A warp that takes all keys of a tile holds its scores: 64 a row is what registers allow.
        too_long = wanted == ROWS[-1] and block_n > 64
        if too_long or block_n * padded * ITEMSIZE[dtype] > most:
            continue
        for block_m in reversed([size for size in ROWS if size <= wanted]):
            found = DecodeConfig(dtype, padded, Tile(block_m, block_n), **features)
            if found.shared_bytes <= limit:
                return found
            smallest = found.shared_bytes
    raise ValueError(
        f"head_dim={head_dim}, {dtype}: even the smallest tile needs {smallest} bytes of shared "
        f"memory, the limit is {limit}"
    )
