"""Steps 1 and 2 of the kernel ladder: standard attention and FlashAttention 2022 as printed.

Drivers for ``standard.cu``, ``flash1_forward.cu`` and ``flash1_backward.cu``. Shapes are
(B, H, Nq, D) for q, out and their gradients, (B, H, Nk, D) for k, v and theirs; row statistics are
(B, H, Nq) in fp32. Causal is bottom-right aligned: query i sees key j when j <= i + Nk - Nq.
A row that sees no key gives 0 and takes part in no gradient.

These steps are for reading beside the paper and for counting bytes: products are plain
multiply-adds. ``kernels/README.md`` is the ladder's table of contents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.shapes import Tile
from kernels.launch import ITEMSIZE, Argument, Array, Backend, Kernel

__all__ = [
    "ALGORITHMS",
    "HOPPER_SHARED_BYTES",
    "all_kernels",
    "default_tile",
    "flash1_backward",
    "flash1_forward",
    "flash1_shared_bytes",
    "paper_tile",
    "standard_backward",
    "standard_forward",
    "standard_shared_bytes",
]

ALGORITHMS = ("standard", "flash1-literal", "flash1")
DTYPES = {"fp16": 0, "bf16": 1, "fp32": 2}
HOPPER_SHARED_BYTES = 232448  # 227 KiB, the most one block may have (H100, H200)
MAX_HEAD_DIM = 128
MAX_ACCUMULATORS = 64  # registers of one thread that hold sums in standard.cu
VECTOR_BYTES = 16
GRID_LIMIT = 2**31 - 1


# ---- tiles and shared memory ---------------------------------------------------------------------


def _pad4(rows: int) -> int:
    return -(-rows // 4) * 4


def _row_elements(head_dim: int, dtype: str) -> int:
    """Distance between rows of a tile in shared memory, LD in ``ladder.cuh``."""
    vec = VECTOR_BYTES // ITEMSIZE[dtype]
    return (head_dim // vec | 1) * vec


def flash1_shared_bytes(tile: Tile, head_dim: int, dtype: str, pass_: str) -> int:
    """Shared memory of one block of ``flash1_forward.cu`` or ``flash1_backward.cu``, bytes.

    Forward: K, V and Q tiles in the io type, S in fp32, four fp32 numbers a row. Backward: also
    dO, and dK, dV in fp32 (the paper's accumulators in SRAM), three numbers a row.
    """
    m, n = _pad4(tile.block_m), _pad4(tile.block_n)
    row_bytes = _row_elements(head_dim, dtype) * ITEMSIZE[dtype]
    scores = m * (n + 4) * 4
    if pass_ == "forward":
        return (2 * n + m) * row_bytes + scores + 4 * m * 4
    # The struct ends on 16 bytes, and so does every part of it.
    return (2 * n + 2 * m) * row_bytes + 2 * n * head_dim * 4 + scores + 3 * m * 4


def standard_shared_bytes(tile: Tile, head_dim: int, dtype: str) -> dict[str, int]:
    """Shared memory of the three forms of product in ``standard.cu``, bytes.

    "pairs": standard_scores, standard_dp. "queries": standard_output, standard_dq. "keys":
    standard_dv, standard_dk. The softmax kernels need :func:`standard_row_bytes`.
    """
    m = _pad4(tile.block_m)
    row_bytes = _row_elements(head_dim, dtype) * ITEMSIZE[dtype]
    weights = m * (tile.block_n + 4) * 4
    return {
        "pairs": (m + tile.block_n) * row_bytes,
        "queries": weights + tile.block_n * row_bytes,
        "keys": weights + m * row_bytes,
    }


def standard_row_bytes(seqlen_k: int, dtype: str, threads: int, rows: int) -> int:
    """Shared memory of a softmax kernel that stages ``rows`` rows (1 forward, 2 backward), bytes."""
    vec = VECTOR_BYTES // ITEMSIZE[dtype]
    return _pad4(threads // 32) * 4 + rows * -(-seqlen_k // vec) * VECTOR_BYTES


def paper_tile(sram_elements: int, head_dim: int) -> Tile:
    """FlashAttention 2022, Algorithm 1 line 1: Bc = ceil(M / 4d), Br = min(Bc, d).

    M is in elements, not bytes, and counts four tiles: K, V, Q and O. Our kernels hold S and a few
    statistics beside them, so a block needs more than M elements of shared memory.
    """
    if sram_elements < 1 or head_dim < 1:
        raise ValueError(f"sram_elements={sram_elements} and head_dim={head_dim} must be positive")
    block_n = -(-sram_elements // (4 * head_dim))
    return Tile(min(block_n, head_dim), block_n)


def default_tile(
    algorithm: str,
    head_dim: int,
    dtype: str,
    pass_: str,
    *,
    shared_limit_bytes: int = HOPPER_SHARED_BYTES,
) -> Tile:
    """64 x 64 for standard; Br = 16 as released and the largest Bc <= 256 that fits for flash1."""
    if algorithm == "standard":
        return Tile(64, 64)
    for block_n in (256, 128, 64, 32, 16):
        tile = Tile(16, block_n)
        needed = flash1_shared_bytes(tile, head_dim, dtype, pass_)
        if needed <= shared_limit_bytes:
            return tile
    raise ValueError(
        f"{algorithm} {pass_}: a 16 x 16 tile at head_dim {head_dim} in {dtype} needs {needed} "
        f"bytes of shared memory, the limit is {shared_limit_bytes}"
    )


def _require_fit(what: str, needed_bytes: int, limit_bytes: int) -> None:
    if needed_bytes > limit_bytes:
        raise ValueError(
            f"{what} needs {needed_bytes} bytes of shared memory, the limit is {limit_bytes}"
        )


# ---- kernels -------------------------------------------------------------------------------------


def _flash1_kernel(
    entry: str, tile: Tile, head_dim: int, dtype: str, pass_: str, literal: bool
) -> Kernel:
    macros = (
        ("BLOCK_M", tile.block_m),
        ("BLOCK_N", tile.block_n),
        ("DTYPE", DTYPES[dtype]),
        ("HEAD_DIM", head_dim),
        ("SHARED_BYTES", flash1_shared_bytes(tile, head_dim, dtype, pass_)),
        ("SKIP_FIRST_READ", int(not literal)),
        ("THREADS", 128),
    )
    return Kernel(f"flash1_{pass_}.cu", entry, macros, threads=128)


def _standard_kernel(entry: str, tile: Tile, head_dim: int, dtype: str) -> Kernel:
    # 128 threads unless their sums would not fit in registers.
    largest = max(_pad4(tile.block_m), tile.block_n) * head_dim
    threads = 128 if largest <= 128 * MAX_ACCUMULATORS else 256
    if largest > threads * MAX_ACCUMULATORS:
        raise ValueError(
            f"standard: block_m={tile.block_m}, block_n={tile.block_n} at head_dim {head_dim} "
            f"keeps {-(-largest // threads)} sums a thread, the limit is {MAX_ACCUMULATORS}"
        )
    if tile.block_n % 8:
        raise ValueError(f"standard: block_n={tile.block_n} is not a multiple of 8")
    shared = standard_shared_bytes(tile, head_dim, dtype)
    macros = (
        ("BLOCK_M", tile.block_m),
        ("BLOCK_N", tile.block_n),
        ("DTYPE", DTYPES[dtype]),
        ("HEAD_DIM", head_dim),
        ("SHARED_BYTES_KEYS", shared["keys"]),
        ("SHARED_BYTES_PAIRS", shared["pairs"]),
        ("SHARED_BYTES_QUERIES", shared["queries"]),
        ("THREADS", threads),
    )
    return Kernel("standard.cu", entry, macros, threads)


_FORM = {  # standard.cu: entry point -> form of product
    "standard_scores": "pairs",
    "standard_output": "queries",
    "standard_dv": "keys",
    "standard_dp": "pairs",
    "standard_dq": "queries",
    "standard_dk": "keys",
}
_ROWS = {"standard_softmax": 1, "standard_softmax_backward": 2}  # entry -> rows staged


def all_kernels(algorithm: str, tile: Tile, head_dim: int, dtype: str) -> list[Kernel]:
    """Every kernel of both passes at one tile, for compile tests and ahead-of-time builds."""
    if algorithm == "standard":
        return [_standard_kernel(entry, tile, head_dim, dtype) for entry in (*_FORM, *_ROWS)]
    _require_known(algorithm)
    literal = algorithm == "flash1-literal"
    entries = [("flash1_forward", "forward"), ("flash1_backward", "backward")]
    if literal:
        entries += [("flash1_init", "forward"), ("flash1_backward_init", "backward")]
    return [
        _flash1_kernel(entry, tile, head_dim, dtype, pass_, literal) for entry, pass_ in entries
    ]


def _require_known(algorithm: str) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}")


# ---- arguments -----------------------------------------------------------------------------------


def _require_arrays(q: Array, k: Array, others: Sequence[tuple[Array, Array]]) -> None:
    """q and k are problems these kernels can run, and each other array is shaped like its model."""
    if len(q.shape) != 4 or len(k.shape) != 4:
        raise ValueError(f"q {q.shape} and k {k.shape} must be (B, H, N, D)")
    batch, heads, _, head_dim = q.shape
    if q.dtype not in DTYPES:
        raise TypeError(f"q is {q.dtype}, not one of {', '.join(DTYPES)}")
    if k.shape[:2] != (batch, heads) or k.shape[3] != head_dim:
        raise ValueError(
            f"q {q.shape} and k {k.shape} must agree in B, H and D: these kernels have one "
            "key/value head per query head"
        )
    if min(*q.shape, *k.shape) < 1:
        raise ValueError(f"q {q.shape} and k {k.shape} must not be empty")
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {head_dim} is not a multiple of 8 up to the limit of {MAX_HEAD_DIM}"
        )
    for array, like in ((q, q), (k, k), *others):
        if array.shape != like.shape:
            raise ValueError(f"{array.name} is {array.shape}, {like.name} is {like.shape}")
        if array.dtype != q.dtype:
            raise TypeError(f"{array.name} is {array.dtype}, q is {q.dtype}")
        offsets = (array.pointer, *(s * array.itemsize for s in array.strides[:-1]))
        if any(offset % VECTOR_BYTES for offset in offsets):
            raise ValueError(
                f"{array.name}: rows must start at multiples of {VECTOR_BYTES} bytes, strides are "
                f"{array.strides} elements of {array.itemsize} bytes from {array.pointer:#x}"
            )


def _grid(blocks: int) -> tuple[int, int, int]:
    if blocks > GRID_LIMIT:
        raise ValueError(f"{blocks} blocks, a grid holds at most {GRID_LIMIT}")
    return blocks, 1, 1


def _matrix(backend: Backend, name: str, q: Array, seqlen_k: int) -> Array:
    """Scratch (B, H, Nq, Nk) in the io type, rows starting at multiples of 16 bytes."""
    batch, heads, seqlen_q, _ = q.shape
    row = -(-seqlen_k // 8) * 8
    memory = backend.empty(name, (batch, heads, seqlen_q, row), q.dtype)
    return Array(
        name, memory.pointer, (batch, heads, seqlen_q, seqlen_k), memory.strides, q.dtype, "rw",
        memory.owner,
    )  # fmt: skip


def _rows(backend: Backend, name: str, q: Array) -> Array:
    return backend.empty(name, q.shape[:3], "fp32")


def _saved(stats: dict[str, Array], name: str, algorithm: str) -> Array:
    if name not in stats:
        raise ValueError(
            f"{algorithm} backward needs {name!r} of its forward pass, stats has {sorted(stats)}"
        )
    return stats[name].with_access("r")


# ---- step 1: standard attention ------------------------------------------------------------------


class _Standard:
    """Launches one kernel of ``standard.cu`` after another at one tile."""

    def __init__(
        self,
        backend: Backend,
        q: Array,
        k: Array,
        tile: Tile | None,
        limit: int,
        stream: int | None,
    ) -> None:
        self.backend, self.limit, self.stream = backend, limit, stream
        self.batch, self.heads, self.seqlen_q, self.head_dim = q.shape
        self.seqlen_k, self.dtype = k.shape[2], q.dtype
        self.tile = (
            default_tile("standard", self.head_dim, self.dtype, "") if tile is None else tile
        )
        shared = standard_shared_bytes(self.tile, self.head_dim, self.dtype)
        self.shared_bytes = {entry: shared[form] for entry, form in _FORM.items()}
        self.kernels = {
            entry: _standard_kernel(entry, self.tile, self.head_dim, self.dtype)
            for entry in (*_FORM, *_ROWS)
        }
        tr, tc = -(-self.seqlen_q // self.tile.block_m), -(-self.seqlen_k // self.tile.block_n)
        self.tiles = {"pairs": tr * tc, "queries": tr, "keys": tc}
        for entry, rows in _ROWS.items():
            self.shared_bytes[entry] = standard_row_bytes(
                self.seqlen_k, self.dtype, self.kernels[entry].threads, rows
            )

    def require_fit(self, *entries: str) -> None:
        """ValueError when one of the launches needs more shared memory than there is."""
        for entry in entries:
            if entry in _ROWS:
                what = f"{entry}: a row of {self.seqlen_k} keys in {self.dtype}"
            else:
                what = (
                    f"{entry}: block_m={self.tile.block_m}, block_n={self.tile.block_n} at "
                    f"head_dim {self.head_dim} in {self.dtype}"
                )
            _require_fit(what, self.shared_bytes[entry], self.limit)

    def launch(self, entry: str, *args: Argument) -> None:
        tiles = self.tiles[_FORM[entry]] if entry in _FORM else self.seqlen_q
        sizes = (np.int32(self.heads), np.int32(self.seqlen_q), np.int32(self.seqlen_k))
        arrays = [arg for arg in args if isinstance(arg, Array)]
        scalars = [arg for arg in args if not isinstance(arg, Array)]
        self.backend.launch(
            self.kernels[entry],
            _grid(self.batch * self.heads * tiles),
            self.shared_bytes[entry],
            [*arrays, *sizes, *scalars],
            self.stream,
        )


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
    shared_limit_bytes: int = HOPPER_SHARED_BYTES,
    stream: int | None = None,
) -> None:
    """out = softmax(scale·q·kᵀ)·v by three kernels (FlashAttention 2022, Alg. 0).

    Puts P, (B, H, Nq, Nk) in the io type, into ``stats["p"]``: the backward pass needs it.

    Raises ValueError or TypeError for shapes, types or alignment the kernels do not handle, and
    when a tile or a row of S does not fit ``shared_limit_bytes``.
    """
    _require_arrays(q, k, [(v, k), (out, q)])
    run = _Standard(backend, q, k, tile, shared_limit_bytes, stream)
    run.require_fit("standard_scores", "standard_softmax", "standard_output")
    s = _matrix(backend, "s", q, run.seqlen_k)
    p = stats["p"] = _matrix(backend, "p", q, run.seqlen_k)
    flags = (np.int32(causal), np.float32(scale))
    q, k, v = (array.with_access("r") for array in (q, k, v))
    run.launch("standard_scores", q, k, s.with_access("w"), *flags)
    run.launch("standard_softmax", s.with_access("r"), p.with_access("w"))
    run.launch("standard_output", p.with_access("r"), v, out.with_access("w"))


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
    shared_limit_bytes: int = HOPPER_SHARED_BYTES,
    stream: int | None = None,
) -> None:
    """dq, dk, dv by five kernels from the stored P (FlashAttention 2022, Alg. 3).

    The mask is in P already. Errors as in :func:`standard_forward`.
    """
    _require_arrays(q, k, [(v, k), (dout, q), (dq, q), (dk, k), (dv, k)])
    run = _Standard(backend, q, k, tile, shared_limit_bytes, stream)
    run.require_fit("standard_dv", "standard_dp", "standard_softmax_backward", "standard_dq")
    p = _saved(stats, "p", "standard")
    dp = _matrix(backend, "dp", q, run.seqlen_k)
    ds = _matrix(backend, "ds", q, run.seqlen_k)
    q, k, v, dout = (array.with_access("r") for array in (q, k, v, dout))
    factor = np.float32(scale)
    run.launch("standard_dv", p, dout, dv.with_access("w"))
    run.launch("standard_dp", dout, v, dp.with_access("w"))
    run.launch("standard_softmax_backward", p, dp.with_access("r"), ds.with_access("w"))
    run.launch("standard_dq", ds.with_access("r"), k, dq.with_access("w"), factor)
    run.launch("standard_dk", ds.with_access("r"), q, dk.with_access("w"), factor)


# ---- step 2: FlashAttention 2022 -----------------------------------------------------------------


def _flash1_setup(
    q: Array, k: Array, tile: Tile | None, pass_: str, literal: bool, limit: int
) -> tuple[Tile, int]:
    """Tile and shared bytes of one pass, refused when they do not fit."""
    head_dim, algorithm = q.shape[3], "flash1-literal" if literal else "flash1"
    if tile is None:
        tile = default_tile(algorithm, head_dim, q.dtype, pass_, shared_limit_bytes=limit)
    needed = flash1_shared_bytes(tile, head_dim, q.dtype, pass_)
    _require_fit(
        f"{algorithm} {pass_}: block_m={tile.block_m}, block_n={tile.block_n} at head_dim "
        f"{head_dim} in {q.dtype}",
        needed,
        limit,
    )
    return tile, needed


def flash1_forward(
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
    literal: bool = False,
    shared_limit_bytes: int = HOPPER_SHARED_BYTES,
    stream: int | None = None,
) -> None:
    """out = softmax(scale·q·kᵀ)·v, keys outside, O, l, m in memory (FlashAttention 2022, Alg. 1, 2).

    ``literal`` initialises O, l, m and reads them at every step, as printed; without it the first
    key tile writes them unread, as in the authors' kernels. Puts the row maximum and the row sum of
    exponentials, (B, H, Nq) fp32, into ``stats["m"]`` and ``stats["l"]``; lse = m + ln l.

    Raises ValueError or TypeError for shapes, types or alignment the kernels do not handle, and
    when the tile does not fit ``shared_limit_bytes``.
    """
    _require_arrays(q, k, [(v, k), (out, q)])
    tile, shared_bytes = _flash1_setup(q, k, tile, "forward", literal, shared_limit_bytes)
    batch, heads, seqlen_q, head_dim = q.shape
    row_sum, row_max = _rows(backend, "l", q), _rows(backend, "m", q)
    stats["l"], stats["m"] = row_sum, row_max
    sizes = (np.int32(heads), np.int32(seqlen_q))
    if literal:
        backend.launch(
            _flash1_kernel("flash1_init", tile, head_dim, q.dtype, "forward", literal),
            _grid(batch * heads * -(-seqlen_q // tile.block_m)),
            0,
            [out.with_access("w"), row_sum.with_access("w"), row_max.with_access("w"), *sizes],
            stream,
        )
    inputs = [array.with_access("r") for array in (q, k, v)]
    state = [array.with_access("rw") for array in (out, row_sum, row_max)]
    flags = (np.int32(causal), np.float32(scale))
    backend.launch(
        _flash1_kernel("flash1_forward", tile, head_dim, q.dtype, "forward", literal),
        _grid(batch * heads),
        shared_bytes,
        [*inputs, *state, *sizes, np.int32(k.shape[2]), *flags],
        stream,
    )


def flash1_backward(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    stats: dict[str, Array],
    dq: Array,
    dk: Array,
    dv: Array,
    *,
    scale: float,
    causal: bool = False,
    tile: Tile | None = None,
    literal: bool = False,
    shared_limit_bytes: int = HOPPER_SHARED_BYTES,
    stream: int | None = None,
) -> None:
    """dq, dk, dv with P recomputed from ``stats["m"]`` and ``stats["l"]`` (FlashAttention 2022, Alg. 4).

    ``literal`` initialises dq, and reads dq and out at every step; without it the first key tile
    writes dq unread and keeps delta = rowsum(dout∘out), (B, H, Nq) fp32, for the later ones.
    Errors as in :func:`flash1_forward`.
    """
    _require_arrays(q, k, [(v, k), (out, q), (dout, q), (dq, q), (dk, k), (dv, k)])
    tile, shared_bytes = _flash1_setup(q, k, tile, "backward", literal, shared_limit_bytes)
    batch, heads, seqlen_q, head_dim = q.shape
    algorithm = "flash1-literal" if literal else "flash1"
    saved = [_saved(stats, name, algorithm) for name in ("l", "m")]
    sizes = (np.int32(heads), np.int32(seqlen_q))
    if literal:
        delta = backend.empty("delta", (1, 1, 1), "fp32")  # an argument this form does not touch
        backend.launch(
            _flash1_kernel("flash1_backward_init", tile, head_dim, q.dtype, "backward", literal),
            _grid(batch * heads * -(-seqlen_q // tile.block_m)),
            0,
            [dq.with_access("w"), *sizes],
            stream,
        )
    else:
        delta = _rows(backend, "delta", q)
    inputs = [array.with_access("r") for array in (q, k, v, out, dout)]
    backend.launch(
        _flash1_kernel("flash1_backward", tile, head_dim, q.dtype, "backward", literal),
        _grid(batch * heads),
        shared_bytes,
        [
            *inputs, *saved, delta, dq.with_access("rw"), dk.with_access("w"), dv.with_access("w"),
            *sizes, np.int32(k.shape[2]), np.int32(causal), np.float32(scale),
        ],
        stream,
    )  # fmt: skip
