"""A causal sliding window: bytes against its size, and what the tiles load beside it.

Query i sees the last w keys up to its own. Three ways to have that:

window       the kernels of step 3 with ``window=(w - 1, 0)``: tiles outside are never loaded
stored mask  the same kernels with the window as a stored mask of N x N elements, 0 or -inf, and no
             other hint: what a fused attention does with a mask that it is given. Every tile is
             visited, and the mask is read in every kernel that makes scores
standard     S and P stored; the mask is applied where S is. Its N x N elements are not even counted

Of "window" two tiles are executed, the kernels' own of the pass and a small one. Where Bc divides
Br, a query tile loads Br + Bc ceil((w - 1) / Bc) keys, in whole tiles, for the w that each of its
rows sees: at w = Br (a multiple of Bc) twice the pairs it needs, and below that the tile and not
the window sets the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.lower_bounds import (
    compulsory_backward_read_bytes,
    compulsory_backward_write_bytes,
    compulsory_read_bytes,
    compulsory_write_bytes,
)
from analysis.shapes import Tile
from kernels.attention import default_tile
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, predicted_traffic, shape_of, tile_of
from repro.experiments.shared.flash_run import counted, run
from repro.experiments.shared.host import counted_traffic

HEAD_DIM, EXECUTED, SUMMED = 64, 1024, 16384
PASSES = ("forward", "backward")
WINDOWS = (16, 32, 64, 128, 256, 512, 1024)
LONGER = (*WINDOWS, 2048, 4096, 8192, 16384)
SMALL = Tile(32, 32)
#: Forward alone, for what they load beside the window.
TILES = (SMALL, Tile(64, 64), Tile(128, 64), Tile(128, 128))
OWN = {pass_: default_tile(HEAD_DIM, "fp16", pass_) for pass_ in PASSES}
#: The window in which the stored mask is executed: its bytes are those of any other.
STORED = 128


def point(way: str, pass_: str, seqlen: int, window: int, tile: Tile | None = None) -> Cell:
    """One pass of one head; window: keys that a query sees, its own included."""
    if way == "window":
        options: dict[str, Any] = {"causal": True, "way": way, "window_left": window - 1}
        return cell("flash", pass_, tile or OWN[pass_], seqlen=seqlen, head_dim=HEAD_DIM, **options)
    name, own = ("standard", Tile(64, 64)) if way == "standard" else ("flash", OWN[pass_])
    causal = way == "standard"  # the stored mask is all that the fused kernels know
    return cell(name, pass_, own, seqlen=seqlen, head_dim=HEAD_DIM, causal=causal, way=way)


def cells() -> list[Cell]:
    """What is executed."""
    listed = []
    for pass_ in PASSES:
        for tile in (OWN[pass_], SMALL):
            listed += [point("window", pass_, EXECUTED, window, tile) for window in WINDOWS]
        listed += [point(way, pass_, EXECUTED, STORED) for way in ("stored mask", "standard")]
    return listed


def predict(one: Cell) -> Iterator[Row]:
    """Exact sums over the tiles that the window leaves; the lower bound of the pass."""
    shape = shape_of(one)
    yield from predicted_traffic(one, **({"bias": (1, 1)} if one["way"] == "stored mask" else {}))
    if one["pass"] == "forward":
        least = compulsory_read_bytes(shape) + compulsory_write_bytes(shape)
    else:
        least = compulsory_backward_read_bytes(shape) + compulsory_backward_write_bytes(shape)
    yield row("compulsory_bytes", least, tool="closed form")
    yield row("visible_pairs", shape.visible_pairs, tool="closed form")


def also() -> Iterator[Cell]:
    """The other tiles, and a length that is not executed."""
    for tile in TILES:
        for window in LONGER:
            yield point("window", "forward", SUMMED, window, tile)
    for pass_ in PASSES:
        if OWN[pass_] not in TILES:
            for window in LONGER:
                yield point("window", pass_, SUMMED, window)
        for way in ("stored mask", "standard"):
            yield point(way, pass_, SUMMED, STORED)


def stored_mask(seqlen: int, window: int) -> NDArray[np.float16]:
    """(N, N): 0 where the window shows a key, -inf elsewhere."""
    row, key = np.ogrid[:seqlen, :seqlen]
    return np.where((key <= row) & (key > row - window), 0, -np.inf).astype(np.float16)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """The kernels, executed and counted, and their error against float64."""
    if one["way"] == "standard":
        return counted_traffic(one, context)
    bias = stored_mask(int(one["seqlen_q"]), STORED) if one["way"] == "stored mask" else None
    return counted(run(one, context, tile=tile_of(one), bias=bias))


EXPERIMENT = Experiment("sliding-window", cells, predict, measure, device="host", also=also, seconds=60, on_demand=True)
