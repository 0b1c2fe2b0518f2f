"""Step 2 of the ladder: launch ``flash1_forward.cu`` and ``flash1_backward.cu``.

FlashAttention 2022 with its own loop order, keys outside and queries inside, in three forms:
*literal* as printed in Algorithms 1, 2 and 4; *skip-first*, where the first key tile has nothing to
read back; *released*, as the authors' code, with fp32 buffers for an unfinished O and dQ.
"""

from __future__ import annotations

import numpy as np

from analysis.algorithms import Form
from analysis.arguments import checked
from analysis.shapes import Tile
from kernels.checks import finite
from kernels.flash_config import SHARED_LIMIT_BYTES
from kernels.ladder_arrays import (
    LadderForm,
    flat_grid,
    pad4,
    require_arrays,
    require_fit,
    roles,
    row_bytes,
    row_statistic,
    saved,
)
from kernels.launch import DTYPE_CODE, Argument, Array, Backend, Count, IoType, Kernel, Pass, Size, Word

THREADS = 128
FORMS: tuple[Form, ...] = ("literal", "skip-first", "released")
"""The macro FORM is a form's place in this list."""
RELEASED_BLOCK_M = 16
"""Br of the authors' kernels, whatever the head dimension."""


@checked
def flash1_shared_bytes(tile: Tile, head_dim: Count, dtype: IoType, pass_: Pass) -> int:
    """Shared memory of a block, bytes; ``pass_`` is "forward" or "backward".

    Forward: K, V and Q tiles in the io type, S in fp32, four fp32 numbers a row. Backward: also
    dO, and dK, dV in fp32 (the paper's accumulators in SRAM), three numbers a row.
    """
    m, n, row = pad4(tile.block_m), pad4(tile.block_n), row_bytes(head_dim, dtype)
    scores = m * (n + 4) * 4
    if pass_ == "forward":
        return (2 * n + m) * row + scores + 4 * m * 4
    return (2 * n + 2 * m) * row + 2 * n * head_dim * 4 + scores + 3 * m * 4


@checked
def flash1_tile(head_dim: Count, dtype: IoType, pass_: Pass, shared_limit_bytes: Size = SHARED_LIMIT_BYTES) -> Tile:
    """Br = 16 and the largest Bc ≤ 256 that fits, as released. ValueError when none does."""
    for block_n in (256, 128, 64, 32, 16):
        tile = Tile(RELEASED_BLOCK_M, block_n)
        if flash1_shared_bytes(tile, head_dim, dtype, pass_) <= shared_limit_bytes:
            return tile
    _require_tile(tile, head_dim, dtype, pass_, shared_limit_bytes)
    return tile


@checked
def flash1_kernel(entry: str, tile: Tile, head_dim: Count, dtype: IoType, pass_: Pass, *, form: Form) -> Kernel:
    """One entry point of ``flash1_<pass_>.cu`` at one tile."""
    macros = (
        ("BLOCK_M", tile.block_m),
        ("BLOCK_N", tile.block_n),
        ("DTYPE", DTYPE_CODE[dtype]),
        ("FORM", FORMS.index(form)),
        ("HEAD_DIM", head_dim),
        ("SHARED_BYTES", flash1_shared_bytes(tile, head_dim, dtype, pass_)),
        ("THREADS", THREADS),
    )
    return Kernel(f"flash1_{pass_}.cu", entry, macros, THREADS, LadderForm(tile, head_dim))


def _require_tile(tile: Tile, head_dim: int, dtype: str, pass_: str, limit_bytes: int) -> int:
    """Shared bytes of a pass; ValueError when they are above the limit."""
    needed = flash1_shared_bytes(tile, head_dim, dtype, pass_)
    what = f"flash1 {pass_}: block_m={tile.block_m}, block_n={tile.block_n} at head_dim {head_dim}"
    require_fit(f"{what} in {dtype}", needed, limit_bytes)
    return needed


@checked
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
    form: Form = "released",
    shared_limit_bytes: Size = SHARED_LIMIT_BYTES,
    stream: Word | None = None,
) -> None:
    """out = softmax(scale·q·kᵀ)·v with O, l, m in memory (FlashAttention 2022, Alg. 1 and 2).

    q, out are (B, H, Nq, D), k, v are (B, H, Nk, D). "literal" initialises O, l, m and reads them
    at every step, as printed; in the other forms the first key tile writes them unread. The row
    maximum and the row sum of exponentials, (B, H, Nq) fp32, go to ``stats["m"]`` and
    ``stats["l"]``, which are made if they are missing; the log-sum-exp is m + ln l, and "released"
    keeps it alone, in ``stats["lse"]``. Causal is bottom-right aligned; a row that sees no key
    gives out 0, l 0, m and lse -inf.

    Raises ValueError or TypeError for shapes, types or alignment the kernels do not handle, and
    when the tile does not fit ``shared_limit_bytes``.
    """
    scale = finite(scale)
    require_arrays(q, k, [(v, k), (out, q)])
    batch, heads, seqlen_q, head_dim = q.shape
    if tile is None:
        tile = flash1_tile(head_dim, q.dtype, "forward", shared_limit_bytes)
    shared_bytes = _require_tile(tile, head_dim, q.dtype, "forward", shared_limit_bytes)
    released = form == "released"
    # An argument that a form does not touch is one element.
    out_tmp = backend.empty("out_tmp", q.shape if released else (1, 1, 1, 1), "fp32")
    row_sum = row_statistic(backend, stats, "lse" if released else "l", q)
    row_max = backend.empty("m", (1, 1, 1), "fp32") if released else row_statistic(backend, stats, "m", q)

    def kernel(entry: str) -> Kernel:
        return flash1_kernel(entry, tile, head_dim, q.dtype, "forward", form=form)

    sizes: list[Argument] = [np.int32(heads), np.int32(seqlen_q)]
    if form == "literal":
        blocks = batch * heads * -(-seqlen_q // tile.block_m)
        state = roles("w", out=out, l=row_sum, m=row_max)
        backend.launch(kernel("flash1_init"), flat_grid(blocks), 0, [*state, *sizes], stream)
    inputs = roles("r", q=q, k=k, v=v)
    state = [*roles("rw", out=out), row_sum.with_access("rw", "lse" if released else "l")]
    state += roles("rw", m=row_max, out_tmp=out_tmp)
    sizes += [np.int32(k.shape[2]), np.int32(causal)]
    args = [*inputs, *state, *sizes, np.float32(scale)]
    backend.launch(kernel("flash1_forward"), flat_grid(batch * heads), shared_bytes, args, stream)


@checked
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
    form: Form = "released",
    shared_limit_bytes: Size = SHARED_LIMIT_BYTES,
    stream: Word | None = None,
) -> None:
    """dq, dk, dv without a stored P (FlashAttention 2022, Alg. 4).

    P is recomputed from the forward pass's ``stats``. "literal" initialises dq, and reads dq and
    out at every step; in the other forms the first key tile writes dq unread and keeps delta =
    rowsum(dout∘out), (B, H, Nq) fp32, for the later ones. Errors as in
    :func:`flash1_forward`.
    """
    scale = finite(scale)
    require_arrays(q, k, [(v, k), (out, q), (dout, q), (dq, q), (dk, k), (dv, k)])
    batch, heads, seqlen_q, head_dim = q.shape
    if tile is None:
        tile = flash1_tile(head_dim, q.dtype, "backward", shared_limit_bytes)
    shared_bytes = _require_tile(tile, head_dim, q.dtype, "backward", shared_limit_bytes)
    released = form == "released"
    kept = "lse" if released else "l"
    row_sum = saved(stats, kept, "flash1", q.shape[:3], "fp32")
    row_max = backend.empty("m", (1, 1, 1), "fp32") if released else saved(stats, "m", "flash1", q.shape[:3], "fp32")
    dq_tmp = backend.empty("dq_tmp", q.shape if released else (1, 1, 1, 1), "fp32")

    def kernel(entry: str) -> Kernel:
        return flash1_kernel(entry, tile, head_dim, q.dtype, "backward", form=form)

    sizes: list[Argument] = [np.int32(heads), np.int32(seqlen_q)]
    if form == "literal":
        blocks = batch * heads * -(-seqlen_q // tile.block_m)
        backend.launch(kernel("flash1_backward_init"), flat_grid(blocks), 0, [*roles("w", dq=dq), *sizes], stream)
        delta = backend.empty("delta", (1, 1, 1), "fp32")  # an argument this form does not touch
    else:
        delta = row_statistic(backend, {}, "delta", q)
    inputs = [*roles("r", q=q, k=k, v=v, out=out, dout=dout), row_sum.with_access("r", kept)]
    inputs += roles("r", m=row_max)
    state = roles("rw", delta=delta, dq_tmp=dq_tmp, dq=dq)
    results = roles("w", dk=dk, dv=dv)
    sizes += [np.int32(k.shape[2]), np.int32(causal)]
    args = [*inputs, *state, *results, *sizes, np.float32(scale)]
    backend.launch(kernel("flash1_backward"), flat_grid(batch * heads), shared_bytes, args, stream)
