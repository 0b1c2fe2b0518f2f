"""Time of every step of the ladder on a GPU, at the shape of FlashAttention 2022, Fig. 2.

One row per step and tile: what the paper's Fig. 2 middle shows for its kernel (time against block
size), for all of them. The steps of a cell are not interleaved: they differ by far more than a
card's clock drifts. A tile whose arrays do not fit into shared memory is no cell; it is a predicted
row that says how much it would need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analysis.shapes import Tile
from kernels.dispatch import default_tile
from kernels.flash1 import flash1_shared_bytes
from kernels.flash_config import SHARED_LIMIT_BYTES
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, tile_of

SQUARES = (32, 64, 128)


def cells() -> list[Cell]:
    """The fast form over tiles, the paper's form over its block sizes, the unfused form."""
    return [one for one in listed() if unsupported_reason(one) is None]


def unsupported_reason(one: Cell) -> str | None:
    """What keeps the cell's kernel from running on the card of our records, or None."""
    if one["implementation"] != "flash1-released":
        return None
    needed = flash1_shared_bytes(tile_of(one), int(one["head_dim"]), str(one["dtype"]), str(one["pass"]))
    if needed <= SHARED_LIMIT_BYTES:
        return None
    return f"needs {needed} bytes of shared memory, a block has {SHARED_LIMIT_BYTES}"


def listed() -> list[Cell]:
    """All combinations, also those that do not fit."""
    shape: dict[str, Any] = {"seqlen": 1024, "head_dim": 64, "batch": 64, "heads": 16}
    both = ("forward", "backward")
    every = [cell("flash", p, Tile(m, n), **shape) for p in both for m in (64, 128) for n in SQUARES]
    every += [cell("flash-deterministic", "backward", Tile(64, 64), **shape)]
    every += [
        cell("flash-sm90", p, default_tile("flash-sm90", 64, "fp16", p, causal=False, seqlen_q=1024), **shape)
        for p in both
    ]
    every += [cell("flash1-released", p, Tile(16, bc), **shape) for p in both for bc in (64, 128, 256, 512)]
    every += [cell("standard", p, Tile(64, 64), **shape) for p in both]
    return every


def also() -> list[Cell]:
    """Every combination that is left out."""
    return [one for one in listed() if unsupported_reason(one)]


def predict(one: Cell) -> Iterator[Row]:
    """The reason of what is left out. Bytes are predicted in gpu-traffic, bounds in the throughput
    experiment."""
    reason = unsupported_reason(one)
    if reason is not None:
        yield row("time_ms", error=reason, tool="shared memory of the tile's arrays")


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """Median of event-timed launches."""
    from repro.instruments.gpu_work import cell_work
    from repro.instruments.timing import TorchDevice, time_work

    timing = time_work(cell_work(one), TorchDevice(), budget_ms=50.0, max_repeats=30)
    yield timing.row("CUDA events, median, L2 flushed")


EXPERIMENT = Experiment("gpu-ladder", cells, predict, measure, device="cuda", also=also, seconds=50)
