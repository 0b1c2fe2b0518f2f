"""Which kernels run a problem on a device: one rule, and the reason it gives.

The Hopper kernels run where all of these hold, in this order; the sm_80 form runs everything else.

1. the device has compute capability 9.0 (their instructions exist nowhere else);
2. no tile was asked for (tiles of the operator are tiles of the sm_80 form);
3. :func:`kernels.hopper.why_not` has no objection: type, head dimension, scale, masks, dropout;
4. TMA can address every array: rows, heads and batches lie a positive multiple of 16 bytes apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from analysis.shapes import Tile
from kernels import hopper
from kernels.flash_config import SHARED_LIMIT_BYTES
from kernels.flash_config import default_tile as sm80_tile
from kernels.launch import Array, Backend

HOPPER = "90"


@dataclass(frozen=True)
class Choice:
    """An algorithm of ``kernels.attention`` and why it is that one."""

    algorithm: str
    reason: str


def choose(
    backend: Backend,
    arrays: Iterable[Array],
    *,
    scale: float,
    pass_: str = "forward",
    tile: Tile | None = None,
    key_mask: bool = False,
    dropout: bool = False,
    block_mask: bool = False,
    deterministic: bool = False,
) -> Choice:
    """ "flash-sm90" or "flash", by the rule above.

    deterministic: dq must be the same bit for bit in every run: "flash-sm90-deterministic" or
    "flash-split".
    arrays: all (B, H, N, D) arrays of the pass, q first.
    pass_: "forward" or "backward", chosen each for itself: both forms keep the same lse.
    """
    listed = list(arrays)
    q = listed[0]
    capability = getattr(backend, "compute_capability", None)
    objection = None
    if capability != HOPPER:
        where = "the host" if capability is None else f"compute capability {capability}"
        objection = f"{where}, not {HOPPER}"
    elif tile is not None:
        objection = f"tile ({tile.block_m}, {tile.block_n}) was asked for"
    else:
        objection = hopper.why_not(
            q.dtype,
            q.shape[3],
            scale=scale,
            pass_=pass_,
            keys=min((array.shape[2] for array in listed), default=0),
            key_mask=key_mask,
            dropout=dropout,
            block_mask=block_mask,
        )
        objection = objection or next(filter(None, map(_unreachable, listed)), None)
    if objection is None:
        algorithm = hopper.DETERMINISTIC if deterministic else hopper.ALGORITHM
        return Choice(algorithm, "the Hopper kernels cover it")
    return Choice("flash-split" if deterministic else "flash", objection)


def _unreachable(array: Array) -> str | None:
    """Why no tensor map describes the array, or None."""
    for size, stride in zip(array.shape[:3], array.strides[:3], strict=True):
        if size > 1 and (stride == 0 or stride * array.itemsize % 16):
            return f"{array.name} has a stride of {stride * array.itemsize} bytes"
    if array.pointer % 16:
        return f"{array.name} starts at {array.pointer:#x}, no multiple of 16"
    return None


def default_tile(
    algorithm: str,
    head_dim: int,
    dtype: str,
    pass_: str,
    *,
    causal: bool,
    seqlen_q: int,
    limit: int = SHARED_LIMIT_BYTES,
) -> Tile:
    """The tile a flash algorithm runs with when none is asked for."""
    if algorithm.startswith(hopper.ALGORITHM):
        return hopper.default_tile(head_dim, pass_, causal, seqlen_q)
    return sm80_tile(head_dim, dtype, pass_, limit)
