"""How the tensor-core kernels are cut to a problem: tile, warps, stages, shared memory, macros.

The numbers here mirror the layout at the top of ``flash_forward.cu`` and ``flash_backward.cu``. The
host backend refuses a kernel that steps outside the shared memory computed here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from analysis.arguments import check_fields, checked
from analysis.features import FEATURES
from analysis.hardware import H100_SXM, Gpu
from analysis.occupancy import MAX_REGISTERS_PER_THREAD, REGISTER_UNIT, WARP, Occupancy, occupancy
from analysis.shapes import SCALE_UNIT, Tile
from kernels.launch import DTYPE_CODE, ITEMSIZE, Kernel, Size

HEAD_DIMS = (32, 64, 128, 256)
"""Columns a tile can have; a head dimension in between is padded with zeros inside the kernel."""

SHARED_LIMIT_BYTES = 227 * 1024
"""Shared memory a block may have on H100 and H200; the limit of the host backend too."""

OTHER_REGISTERS = 64
"""What a thread keeps beside accumulators: addresses, row statistics, operands on their way."""

PASSES = ("forward", "backward", "backward-dq")
"""The main kernels; "backward-dq" is the split form's second pass, dQ with the queries outside."""

MACROS = {each.name: each.macro for each in FEATURES.values() if each.macro}
"""Options that kernels are compiled for."""

BIAS_GRADIENTS = ("", "write", "atomic", "workspace")
"""How the gradient of a bias leaves the backward; the place in this list is BIAS_GRADIENT."""

# Tiles in order of preference: the first that fits into shared memory is taken. Large block_m
# (forward) and block_n (backward) mean fewer reads of the other side, and in the backward pass
# fewer additions to dQ; what limits them is the register file, with no spilled register allowed:
#
# forward   a thread of a warp with 16 rows holds head_dim/2 output and block_n/2 score values.
#           128 x 64 at head_dim 128 is 64 + 32 of 255 registers and 96 KiB of tiles; on an A100
#           32 rows a warp, 128 + 64 registers, and 64 KiB (configure).
# backward  a thread holds head_dim values of dK and dV for each 16 key rows of its warp: 128
#           registers at head_dim 128, so every warp has 16 of the 128 rows; at 64, 32 rows.
# fp32 has tiles of twice the bytes and stages P (and dS) in shared memory.
_TILES: dict[tuple[str, bool], dict[int, tuple[tuple[int, int], ...]]] = {
    ("forward", False): {
        32: ((128, 64), (64, 64)),
        64: ((128, 64), (64, 64)),
        128: ((128, 64), (64, 64), (64, 32)),
        256: ((128, 32), (64, 32), (32, 32)),
    },
    ("forward", True): {
        32: ((64, 64), (32, 32)),
        64: ((64, 64), (32, 32)),
        128: ((64, 32), (32, 32)),
        256: ((32, 32), (16, 16)),
    },
    ("backward-dq", False): {
        32: ((128, 64), (64, 64)),
        64: ((128, 64), (64, 64)),
        128: ((128, 32), (64, 32)),
        256: ((128, 16), (64, 16)),
    },
    ("backward", False): {
        32: ((64, 128), (64, 64)),
        64: ((64, 128), (64, 64), (32, 64)),
        128: ((64, 128), (32, 128), (32, 64)),
        256: ((32, 64), (16, 64), (16, 32)),
    },
    ("backward-dq", True): {
        32: ((64, 64), (32, 32)),
        64: ((64, 64), (32, 32)),
        128: ((64, 32), (32, 32)),
        256: ((32, 32), (16, 16)),
    },
    ("backward", True): {
        32: ((32, 64), (32, 32)),
        64: ((32, 64), (32, 32)),
        128: ((32, 64), (32, 32), (16, 32)),
        256: ((16, 32), (16, 16)),
    },
}


@checked
def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile that holds ``head_dim``.

    ValueError unless head_dim is a multiple of 8 in 8…256; it names the value and the limit.
    """
    if head_dim < 1 or head_dim > HEAD_DIMS[-1]:
        raise ValueError(f"head_dim={head_dim} is outside 8…{HEAD_DIMS[-1]}")
    if head_dim % 8:
        raise ValueError(f"head_dim={head_dim} is not a multiple of 8")
    return next(d for d in HEAD_DIMS if d >= head_dim)


def _groups_a_warp(pass_: str, head_dim: int, tile: Tile, masks: bool, stages: int) -> int:
    """16-row groups of a warp: two where the registers allow it, because then each operand of the
    other side that comes from shared memory serves two products. A forward with one stage may take
    all the registers there are: two such blocks fill an SM."""
    if pass_ == "backward-dq" or masks:
        return 1  # dQ has two score tiles beside it; masks and random words take registers too
    if pass_ == "forward":
        rows, registers = tile.block_m, tile.block_n // 2 + head_dim // 2
    else:
        rows, registers = tile.block_n, head_dim
    most = 96 if pass_ == "forward" and stages == 1 else 64
    return 2 if rows > 64 and rows % 32 == 0 and registers <= most else 1


@dataclass(frozen=True)
class FlashConfig:
    """One compiled form of a pass. ``head_dim`` is the padded one."""

    pass_: str
    dtype: str
    head_dim: int
    tile: Tile
    features: frozenset[str] = frozenset()
    """Those of ``analysis.features`` with a macro; a block mask's is ``block_size``."""
    stages: int = 2
    block_size: tuple[int, int] | None = None
    """(rows, keys) of a block of the block mask, multiples of the tile; None without one."""
    bias_gradient: str = ""
    """How its gradient leaves, one of ``BIAS_GRADIENTS`` (backward only); "" for no gradient."""
    any_scale: bool = False
    """The scale may be zero or negative (forward only)."""
    progress: int = 0
    """Tiles after which a block notes the time; 0: never (forward only)."""
    deterministic: bool = False
    """dQ through an ordered workspace (backward only)."""
    dlse: bool = False
    """lse has an incoming gradient (backward only)."""
    query_gradient: bool = True
    """dQ is made, or at least its sum (backward only); False leaves it to "backward-dq"."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.pass_ not in PASSES:
            raise ValueError(f"pass_={self.pass_!r} is not one of {PASSES}")
        if self.dtype not in DTYPE_CODE:
            raise TypeError(f"dtype {self.dtype!r} is not one of {list(DTYPE_CODE)}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"padded head_dim={self.head_dim} is not one of {HEAD_DIMS}")
        unknown = self.features - MACROS.keys()
        if unknown:
            raise TypeError(f"no kernel is compiled for {', '.join(sorted(unknown))}")
        if self.progress < 0:
            raise ValueError(f"progress={self.progress} is negative")
        if "packed" in self.features and self.deterministic:
            raise ValueError(f"{self.pass_}: packed sequences have no ordered workspace for dQ")
        if self.pass_ != "forward" and self.progress:
            raise ValueError(f"{self.pass_}: progress={self.progress} is the forward's")
        if self.bias_gradient not in BIAS_GRADIENTS:
            raise ValueError(f"bias_gradient={self.bias_gradient!r} is not one of {BIAS_GRADIENTS}")
        if self.bias_gradient and not ("bias" in self.features and self.pass_ == "backward"):
            raise ValueError(f"{self.pass_}: bias_gradient={self.bias_gradient!r} is of a backward with a bias")
        wide = self.dtype == "fp32" or self.stages != 1
        if "fp8" in self.features and (self.pass_ != "forward" or wide):
            raise ValueError(
                f"fp8: K and V of e4m3 are of a forward in 16 bits with one stage, not of a "
                f"{self.pass_} in {self.dtype} with {self.stages}"
            )
        if self.stages not in (1, 2):
            raise ValueError(f"stages={self.stages} is neither 1 nor 2")
        for name, rows in (("block_m", self.tile.block_m), ("block_n", self.tile.block_n)):
            if rows % 16 or not 16 <= rows <= 256:
                raise ValueError(f"{name}={rows} is not a multiple of 16 in 16…256")
        if self.threads > 512:
            raise ValueError(
                f"tile ({self.tile.block_m}, {self.tile.block_n}) at head_dim {self.head_dim} "
                f"needs {self.threads} threads, the limit is 512"
            )
        if self.block_size is not None:
            for name, block, rows in zip(
                ("rows", "keys"), self.block_size, (self.tile.block_m, self.tile.block_n), strict=True
            ):
                if block < 1 or block % rows:
                    raise ValueError(f"the block mask has {block} {name} a block, not a multiple of the tile's {rows}")

    @property
    def num_warps(self) -> int:
        """Warps a block."""
        masks = any(FEATURES[name].registers for name in self.features)
        masks = masks or self.block_size is not None
        groups = _groups_a_warp(self.pass_, self.head_dim, self.tile, masks, self.stages)
        if self.pass_ != "backward":
            return self.tile.block_m // (16 * groups)
        # Warps that share key rows, each with its columns of dK and dV: SHARES in the source.
        columns = 64 if self.dtype == "fp32" else 128
        return self.tile.block_n // (16 * groups) * max(self.head_dim // columns, 1)

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * self.num_warps

    @property
    def registers_per_thread(self) -> int:
        """Estimate: fp32 accumulators, the forward's fragments of Q where they stay in registers,
        and ``OTHER_REGISTERS``. How many blocks an SM holds follows (a test compares with what the
        compiler made, docs/kernel-audit.csv). More than a thread can have are spilled."""
        rows, columns = self.tile.block_m, self.tile.block_n
        fragments = 0
        if self.pass_ == "backward":
            sums = columns * 2 * (self.head_dim + rows)  # dK and dV, S and dP transposed
        elif self.pass_ == "backward-dq":
            sums = rows * (self.head_dim + 2 * columns)
        else:
            sums = rows * (self.head_dim + columns)
            rows_a_warp = rows // self.num_warps
            if self.dtype != "fp32" and rows_a_warp // 16 * self.head_dim <= 128:
                fragments = rows_a_warp * self.head_dim * ITEMSIZE[self.dtype] // (4 * 32)
        return sums // self.threads + fragments + OTHER_REGISTERS

    def most_registers(self, gpu: Gpu) -> int:
        """What a thread can have if one block is to fit an SM."""
        unit = REGISTER_UNIT // WARP  # a thread's share of what warps are given at a time
        return min(MAX_REGISTERS_PER_THREAD, gpu.registers_per_sm // self.threads // unit * unit)

    def fit(self, gpu: Gpu) -> Occupancy:
        """Blocks that an SM holds, by the estimate of the registers."""
        registers = min(self.registers_per_thread, self.most_registers(gpu))
        return occupancy(gpu, threads=self.threads, registers_per_thread=registers, shared_bytes=self.shared_bytes)

    def blocks_per_sm(self, limit: int = SHARED_LIMIT_BYTES) -> int:
        """Of the device whose blocks may have ``limit`` bytes of shared memory: all that run these
        kernels have 64 K registers and 1 KiB of shared memory more an SM."""
        reserved = H100_SXM.shared_reserved_per_block
        sm = replace(H100_SXM, shared_bytes_per_sm=limit + reserved, shared_bytes_per_block=limit)
        return max(1, self.fit(sm).blocks_per_sm)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block of the pass's main kernel."""
        size = ITEMSIZE[self.dtype]
        block_m, block_n = self.tile.block_m, self.tile.block_n
        query_tile = block_m * self.head_dim * size
        key_tile = block_n * self.head_dim * size
        scores = block_m * block_n * size
        flags = 4 * self.threads if self.block_size else 0
        fp8, masked = "fp8" in self.features, "key_mask" in self.features
        slopes = 16 * len(self.features & {"alibi", "sink_logits"})
        lengths = 16 if "packed" in self.features else 0
        if self.pass_ != "backward":
            queries = query_tile if self.pass_ == "forward" else 2 * query_tile
            staged = scores if self.dtype == "fp32" else 0
            keep = 2 * 4 * block_n if masked else 0
            codes = 2 * block_n * self.head_dim + 2 * 4 * block_n // SCALE_UNIT if fp8 else 0
            words = keep + slopes + lengths + flags
            return queries + 2 * self.stages * key_tile + staged + codes + words
        staged = scores if self.dtype == "fp32" or self.head_dim > 128 else 0
        keep = 4 * block_n if masked else 0
        stats = 4 * block_m * 4
        fixed = scores + staged + stats + keep + slopes + lengths + flags
        return 2 * key_tile + 2 * self.stages * query_tile + fixed

    def _macros(self) -> dict[str, int]:
        macros = {
            "DTYPE": DTYPE_CODE[self.dtype],
            "HEAD_DIM": self.head_dim,
            "BLOCK_M": self.tile.block_m,
            "BLOCK_N": self.tile.block_n,
            "CAUSAL": int("causal" in self.features),
        }
        if "window" in self.features:
            macros["WINDOW"] = 1
        if self.block_size is not None:
            macros |= {"BLOCK_SPARSE": 1, "SPARSE_M": self.block_size[0], "SPARSE_N": self.block_size[1]}
        return macros

    def kernel(self) -> Kernel:
        """``flash_forward``, ``flash_backward`` or ``flash_backward_dq``."""
        macros = self._macros() | {"NUM_WARPS": self.num_warps, "STAGES": self.stages}
        macros |= {MACROS[name]: 1 for name in self.features}
        if self.any_scale:
            macros["ANY_SCALE"] = 1
        if self.deterministic:
            macros["DETERMINISTIC"] = 1
        if self.bias_gradient:
            macros["BIAS_GRADIENT"] = BIAS_GRADIENTS.index(self.bias_gradient)
        if self.progress:
            macros["PROGRESS"] = self.progress
        if not self.query_gradient:
            macros["QUERY_GRADIENT"] = 0
        entry = f"flash_{self.pass_}".replace("-", "_")
        return Kernel(f"{entry}.cu", entry, tuple(macros.items()), self.threads, self)

    @property
    def row_block_m(self) -> int:
        """Query rows a block of the row kernels. Only the ordered sum over key tiles asks for the
        tile's own; one size for all others keeps the number of compiled forms down."""
        return self.tile.block_m if self.deterministic else 64

    def row_kernels(self) -> tuple[Kernel, Kernel]:
        """``flash_backward_preprocess`` and ``flash_backward_postprocess``, four warps each."""
        if self.deterministic:
            macros = self._macros() | {"DETERMINISTIC": 1}
        else:
            macros = {"DTYPE": DTYPE_CODE[self.dtype], "HEAD_DIM": self.head_dim, "CAUSAL": 0}
            macros |= {"BLOCK_M": self.row_block_m, "BLOCK_N": 64}
            if not self.query_gradient:
                macros["DETERMINISTIC"] = 1  # there is no accumulator to zero
        macros["NUM_WARPS"] = 4
        if self.dlse:
            macros["DLSE"] = 1
        source = "flash_backward_rows.cu"
        return (
            Kernel(source, "flash_backward_preprocess", tuple(macros.items()), 128),
            Kernel(source, "flash_backward_postprocess", tuple(macros.items()), 128),
        )


@checked
def shared_bytes(config: FlashConfig, limit: int = SHARED_LIMIT_BYTES) -> int:
    """Dynamic shared memory of the main kernel. ValueError with both numbers above ``limit``."""
    needed = config.shared_bytes
    if needed > limit:
        raise ValueError(
            f"{config.pass_} tile ({config.tile.block_m}, {config.tile.block_n}) at head_dim "
            f"{config.head_dim}, {config.dtype} needs {needed} bytes of shared memory, "
            f"the limit is {limit}"
        )
    return needed


@checked
def default_tile(head_dim: int, dtype: str, pass_: str, limit: Size = SHARED_LIMIT_BYTES, *, fp8: bool = False) -> Tile:
    """The tile used when the caller names none: the first of the list above that fits ``limit``.

    head_dim: of the caller; any multiple of 8 up to 256. pass_: one of ``PASSES``.
    fp8: K and V are e4m3.
    """
    if dtype not in DTYPE_CODE:
        raise TypeError(f"dtype {dtype!r} is not one of {list(DTYPE_CODE)}")
    if pass_ not in PASSES:
        raise ValueError(f"pass_={pass_!r} is not one of {PASSES}")
    padded = padded_head_dim(head_dim)
    keys = frozenset({"fp8"} if fp8 else ())
    tiles = [Tile(m, n) for m, n in _TILES[pass_, dtype == "fp32"][padded]]
    smallest = 0
    for tile in tiles:
        smallest = FlashConfig(pass_, dtype, padded, tile, keys, stages=1).shared_bytes
        # Masks add up to 2 KiB.
        if smallest + 2048 <= limit:
            return tile
    raise ValueError(
        f"head_dim={head_dim}, {dtype}: even the smallest {pass_} tile needs {smallest + 2048} "
        f"bytes of shared memory, the limit is {limit}"
    )


@checked
def configure(
    pass_: str,
    dtype: str,
    head_dim: int,
    *,
    tile: Tile | None = None,
    limit: Size = SHARED_LIMIT_BYTES,
    block_size: tuple[int, int] | None = None,
    features: Collection[str] = (),
    **more: Any,
) -> FlashConfig:
    """The form for a problem: tiles double-buffered where shared memory allows it.

    features: as of :class:`FlashConfig`; a flag of the name does as well. more: its other fields.

    ValueError with both numbers when a tile does not fit into ``limit`` bytes.
    """
    padded = padded_head_dim(head_dim)
    asked = {name for name in MACROS if more.pop(name, False)} | set(features)
    asked.discard("block_mask")  # block_size says more
    fp8 = "fp8" in asked
    if tile is None:
        tile = default_tile(head_dim, dtype, pass_, limit, fp8=fp8)
    form = FlashConfig(
        pass_, dtype, padded, tile, frozenset(asked), stages=1 if fp8 else 2, block_size=block_size, **more
    )
    one = replace(form, stages=1)
    two_fit = form.shared_bytes <= limit
    # Where shared memory holds one block of two stages but two of one: tiles that come in turn to two
    # blocks hide more, by the model of time (16 bits; it has none of fp32).
    more_blocks = (
        pass_ == "forward"
        and dtype != "fp32"
        and 2 * form.shared_bytes > limit
        and one.blocks_per_sm(limit) > form.blocks_per_sm(limit)
    )
    if two_fit and not more_blocks:
        return form
    shared_bytes(one, limit)
    return one
