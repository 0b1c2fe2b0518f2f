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


#: A shape's fields in a cell.
SHAPE = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "dtype", "causal")


def cell(
    implementation: str | None,
    pass_: str,
    tile: Tile | None = None,
    *,
    seqlen: int,
    head_dim: int,
    seqlen_k: int | None = None,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    dtype: str = "fp16",
    causal: bool = False,
    **more: Any,
) -> Cell:
    """One pass of one algorithm; as many keys as queries and kv_heads as heads where none are given.

    implementation: None where several take turns in the cell.
    """
    keys = seqlen if seqlen_k is None else seqlen_k
    shape = AttentionShape(batch, heads, seqlen, keys, head_dim, kv_heads or heads, dtype, causal)
    return cell_of(shape, implementation, pass_, tile, **more)


def cell_of(
    shape: AttentionShape, implementation: str | None, pass_: str, tile: Tile | None = None, **more: Any
) -> Cell:
    """The cell of one pass over a shape (B, H, N, D)."""
    fields: dict[str, Any] = {name: getattr(shape, name) for name in SHAPE}
    if implementation is not None:
        fields["implementation"] = implementation
    if tile is not None:
        fields |= {"block_m": tile.block_m, "block_n": tile.block_n}
    return Cell(pass_=pass_, **fields | more)


def shape_of(cell: Cell) -> AttentionShape:
    """The shape (B, H, N, D) of a cell, with its window where it has one."""
    values: dict[str, Any] = {name: cell[name] for name in SHAPE}
    if "window_left" in cell:
        values["window"] = (cell["window_left"], None)
    return AttentionShape(**values)


def tile_of(cell: Cell) -> Tile:
    """The tile of a cell."""
    return Tile(int(cell["block_m"]), int(cell["block_n"]))
