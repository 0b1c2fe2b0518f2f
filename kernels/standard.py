"""Step 1 of the ladder: launch ``standard.cu``, attention with S and P in memory.

FlashAttention 2022, Algorithm 0 (forward) and Algorithm 3 (backward): three and five kernels.
"""

from __future__ import annotations

import numpy as np

from analysis.arguments import checked
from analysis.shapes import Tile
from kernels.checks import finite
from kernels.flash_config import SHARED_LIMIT_BYTES
from kernels.ladder_arrays import (
    VECTOR_BYTES,
    LadderForm,
    flat_grid,
    pad4,
    require_arrays,
    require_fit,
    roles,
    row_bytes,
    saved,
    score_matrix,
)
from kernels.launch import DTYPE_CODE, ITEMSIZE, Argument, Array, Backend, Count, IoType, Kernel, Size, Word

DEFAULT_TILE = Tile(64, 64)
MAX_SUMS = 64
"""Registers of one thread that may hold sums: with more, the compiler begins to spill."""

FORM = {
    "standard_scores": "pairs",
    "standard_output": "queries",
    "standard_dv": "keys",
    "standard_dp": "pairs",
    "standard_dq": "queries",
    "standard_dk": "keys",
}
"""Entry point -> form of its product in ``standard.cu``."""

ROWS = {"standard_softmax": 1, "standard_softmax_backward": 2}
"""Entry point -> rows of an N × N matrix that a block stages in shared memory."""


@checked
def standard_shared_bytes(tile: Tile, head_dim: Count, dtype: IoType) -> dict[str, int]:
    """Shared memory of a block, by form of product, bytes.

    "pairs": two tiles of rows. "queries" and "keys": a tile of P or dS in fp32 and the rows it
    weights. The softmax kernels need :func:`standard_row_bytes`.
    """
    m, n, row = pad4(tile.block_m), tile.block_n, row_bytes(head_dim, dtype)
    weights = m * (n + 4) * 4
    return {"pairs": (m + n) * row, "queries": weights + n * row, "keys": weights + m * row}


@checked
def standard_row_bytes(seqlen_k: Size, dtype: IoType, threads: Count, rows: Count) -> int:
    """Shared memory of a softmax kernel that stages ``rows`` rows, bytes."""
    chunks = -(-seqlen_k * ITEMSIZE[dtype] // VECTOR_BYTES)
    return pad4(threads // 32) * 4 + rows * chunks * VECTOR_BYTES


@checked
def standard_kernel(entry: str, tile: Tile, head_dim: Count, dtype: IoType) -> Kernel:
    """One kernel at one tile. ValueError for a tile that ``standard.cu`` does not handle."""
    # 128 threads unless their sums would not fit in registers.
    largest = max(pad4(tile.block_m), tile.block_n) * head_dim
    threads = 128 if largest <= 128 * MAX_SUMS else 256
    if largest > threads * MAX_SUMS:
        raise ValueError(
            f"standard: block_m={tile.block_m}, block_n={tile.block_n} at head_dim {head_dim} "
            f"keeps {-(-largest // threads)} sums a thread, the limit is {MAX_SUMS}"
        )
    if tile.block_n % 8:
        raise ValueError(f"standard: block_n={tile.block_n} is not a multiple of 8")
    shared = standard_shared_bytes(tile, head_dim, dtype)
    macros = (
        ("BLOCK_M", tile.block_m),
        ("BLOCK_N", tile.block_n),
        ("DTYPE", DTYPE_CODE[dtype]),
        ("HEAD_DIM", head_dim),
        ("SHARED_BYTES_KEYS", shared["keys"]),
        ("SHARED_BYTES_PAIRS", shared["pairs"]),
        ("SHARED_BYTES_QUERIES", shared["queries"]),
        ("THREADS", threads),
    )
    return Kernel("standard.cu", entry, macros, threads, LadderForm(tile, head_dim))


class _Launcher:
    """Launches one kernel of ``standard.cu`` after another at one tile and one problem."""

    def __init__(self, backend: Backend, q: Array, k: Array, tile: Tile | None, stream: int | None) -> None:
        self.backend, self.stream = backend, stream
        self.batch, self.heads, self.seqlen_q, self.head_dim = q.shape
        self.seqlen_k, self.dtype = k.shape[2], q.dtype
        self.tile = DEFAULT_TILE if tile is None else tile
        tr, tc = -(-self.seqlen_q // self.tile.block_m), -(-self.seqlen_k // self.tile.block_n)
        self.tiles = {"pairs": tr * tc, "queries": tr, "keys": tc}

    def kernel(self, entry: str) -> Kernel:
        return standard_kernel(entry, self.tile, self.head_dim, self.dtype)

    def shared_bytes(self, entry: str) -> int:
        if entry in FORM:
            return standard_shared_bytes(self.tile, self.head_dim, self.dtype)[FORM[entry]]
        threads = self.kernel(entry).threads
        return standard_row_bytes(self.seqlen_k, self.dtype, threads, ROWS[entry])

    def require_fit(self, limit_bytes: int, *entries: str) -> None:
        for entry in entries:
            if entry in ROWS:
                what = f"{entry}: a row of {self.seqlen_k} keys in {self.dtype}"
            else:
                what = (
                    f"{entry}: block_m={self.tile.block_m}, block_n={self.tile.block_n} at "
                    f"head_dim {self.head_dim} in {self.dtype}"
                )
            require_fit(what, self.shared_bytes(entry), limit_bytes)

    def __call__(self, entry: str, arrays: list[Array], *scalars: Argument) -> None:
        tiles = self.tiles[FORM[entry]] if entry in FORM else self.seqlen_q
        sizes = (np.int32(self.heads), np.int32(self.seqlen_q), np.int32(self.seqlen_k))
        self.backend.launch(
            self.kernel(entry),
            flat_grid(self.batch * self.heads * tiles),
            self.shared_bytes(entry),
            [*arrays, *sizes, *scalars],
            self.stream,
        )


@checked
def standard_forward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    stats: dict[str, Array],
    *,
    scale: float,
    causal: bool = False,
    tile: Tile | None = None,
    shared_limit_bytes: Size = SHARED_LIMIT_BYTES,
    stream: Word | None = None,
) -> None:
    """out = softmax(scale·q·kᵀ)·v by three kernels (FlashAttention 2022, Alg. 0).

    q, out are (B, H, Nq, D), k, v are (B, H, Nk, D). Puts P, (B, H, Nq, Nk) in the io type, into
    ``stats["p"]``: the backward pass needs it. Causal is bottom-right aligned; a row that sees no
    key gives 0.

    Raises ValueError or TypeError for shapes, types or alignment the kernels do not handle, and
    when a tile or a row of S does not fit ``shared_limit_bytes``.
    """
    scale = finite(scale)
    require_arrays(q, k, [(v, k), (out, q)])
    launch = _Launcher(backend, q, k, tile, stream)
    launch.require_fit(shared_limit_bytes, "standard_scores", "standard_softmax", "standard_output")
    s = score_matrix(backend, "s", q, launch.seqlen_k)
    p = stats["p"] = score_matrix(backend, "p", q, launch.seqlen_k)
    flags = (np.int32(causal), np.float32(scale))
    launch("standard_scores", roles("r", q=q, k=k) + roles("w", s=s), *flags)
    launch("standard_softmax", roles("r", s=s) + roles("w", p=p))
    launch("standard_output", roles("r", p=p, v=v) + roles("w", out=out))


@checked
def standard_backward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    stats: dict[str, Array],
    dq: Array,
    dk: Array,
    dv: Array,
    *,
    scale: float,
    tile: Tile | None = None,
    shared_limit_bytes: Size = SHARED_LIMIT_BYTES,
    stream: Word | None = None,
) -> None:
    """dq, dk, dv by five kernels from the stored P (FlashAttention 2022, Alg. 3).

    The mask is in P already. Errors as in :func:`standard_forward`.
    """
    scale = finite(scale)
    require_arrays(q, k, [(v, k), (dout, q), (dq, q), (dk, k), (dv, k)])
    launch = _Launcher(backend, q, k, tile, stream)
    launch.require_fit(
        shared_limit_bytes, "standard_dv", "standard_dp", "standard_softmax_backward", "standard_dq", "standard_dk"
    )
    p = saved(stats, "p", "standard", (*q.shape[:3], launch.seqlen_k), q.dtype)
    dp = score_matrix(backend, "dp", q, launch.seqlen_k)
    ds = score_matrix(backend, "ds", q, launch.seqlen_k)
    factor = np.float32(scale)
    launch("standard_dv", roles("r", p=p, dout=dout) + roles("w", dv=dv))
    launch("standard_dp", roles("r", dout=dout, v=v) + roles("w", dp=dp))
    launch("standard_softmax_backward", roles("r", p=p, dp=dp) + roles("w", ds=ds))
    launch("standard_dq", roles("r", ds=ds, k=k) + roles("w", dq=dq), factor)
    launch("standard_dk", roles("r", ds=ds, q=q) + roles("w", dk=dk), factor)
