"""A point of an experiment as record fields; the shape and tile that an attention cell names."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from analysis.shapes import AttentionShape, Tile
from repro.measuring.records import Scalar


class Cell(dict[str, Scalar]):
    """One point of an experiment: JSON record fields, e.g. ``Cell(implementation="flash", ...)``.

    ``pass`` is a Python keyword, so it is given as ``pass_``.
    """

    def __init__(self, **values: Scalar) -> None:
        super().__init__({("pass" if k == "pass_" else k): v for k, v in values.items()})

    @property
    def id(self) -> str:
        """Identity of the cell: a digest of its fields in any order. A run resumes by it."""
        fields = json.dumps(dict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(fields.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.items())


def cell(
    implementation: str,
    pass_: str,
    tile: Tile,
    *,
    seqlen: int,
    head_dim: int,
    batch: int = 1,
    heads: int = 1,
    dtype: str = "fp16",
    causal: bool = False,
    **more: Any,
) -> Cell:
    """One pass of one algorithm, self-attention with as many kv_heads as heads."""
    return Cell(
        implementation=implementation,
        pass_=pass_,
        batch=batch,
        heads=heads,
        kv_heads=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        block_m=tile.block_m,
        block_n=tile.block_n,
        **more,
    )


def shape_of(cell: Cell) -> AttentionShape:
    """The shape (B, H, N, D) of a cell, with its window where it has one."""
    names = ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "kv_heads", "dtype", "causal")
    values: dict[str, Any] = {name: cell[name] for name in names}
    if "window_left" in cell:
        values["window"] = (cell["window_left"], None)
    return AttentionShape(**values)


def tile_of(cell: Cell) -> Tile:
    """The tile of a cell."""
    return Tile(int(cell["block_m"]), int(cell["block_n"]))
