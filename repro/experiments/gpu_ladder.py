"""Time of every step of the ladder on a GPU, at the shape of FlashAttention 2022, Fig. 2.

One row per step and tile: what the paper's Fig. 2 middle shows for its kernel (time against block
size), for all of them. The steps of a cell are not interleaved: they differ by far more than a
card's clock drifts.
"""

from __future__ import annotations

from typing import Any

from analysis.shapes import Tile
from kernels.dispatch import default_tile
from repro.experiments import Cell, Context, Experiment
from repro.experiments._attention import cell
from repro.records import Record, record

NAME = "gpu-ladder"
SQUARES = (32, 64, 128)


def cells() -> list[Cell]:
    """The fast form over tiles, the paper's form over its block sizes, the unfused form."""
    shape: dict[str, Any] = {"seqlen": 1024, "head_dim": 64, "batch": 64, "heads": 16}
    both = ("forward", "backward")
    listed = [
        cell("flash", p, Tile(m, n), **shape) for p in both for m in (64, 128) for n in SQUARES
    ]
    listed += [cell("flash-deterministic", "backward", Tile(64, 64), **shape)]
    listed += [
        cell(
            "flash-sm90", p,
            default_tile("flash-sm90", 64, "fp16", p, causal=False, seqlen_q=1024), **shape,
        )
        for p in both
    ]  # fmt: skip
    listed += [cell("flash1", p, Tile(16, bc), **shape) for p in both for bc in (64, 128, 256, 512)]
    listed += [cell("standard", p, Tile(64, 64), **shape) for p in both]
    return listed


def predict(one: Cell) -> list[Record]:
    """None of its own: bytes are predicted in gpu-traffic, bounds in the throughput experiment."""
    return []


def measure(one: Cell, context: Context) -> list[Record]:
    """Median of event-timed launches."""
    from repro.instruments.gpu_work import cell_work
    from repro.instruments.timing import TorchDevice, time_work

    timing = time_work(cell_work(one), TorchDevice(), budget_ms=50.0, max_repeats=30)
    return [
        record(
            one, experiment=NAME, source="measured", metric="time_ms", value=timing.median_ms,
            unit="ms", spread_min=timing.min_ms, spread_max=timing.max_ms,
            spread_n=timing.repeats, tool="CUDA events, median, L2 flushed",
        )
    ]  # fmt: skip


EXPERIMENT = Experiment(
    name=NAME,
    title="time of every step of the ladder",
    cells=cells,
    predict=predict,
    measure=measure,
    device="cuda",
    seconds=50,
)
