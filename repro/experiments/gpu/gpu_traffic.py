"""Counted bytes of our kernels on a GPU, at both levels, beside the predictions.

Every step of the ladder at the shape of FlashAttention 2022, Fig. 2 (N = 1024, d = 64, 1024 heads)
with its block sizes, ragged and causal shapes, and one long head whose keys outgrow L2. The Hopper
forward comes in the form that its rule picks for these lengths, with persistent blocks, and with
one block a tile; the implementation is the form's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from analysis.hardware import find_gpu
from analysis.hbm import predict_hbm
from analysis.shapes import Tile
from analysis.traffic import predict_traffic
from kernels import hopper
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell, shape_of, sum_of, tile_of
from repro.experiments.shared.profiled import Profiled, seconds_of
from repro.instruments.counters import KernelCount

#: Cells of one profiled process.
BATCH = 12
#: Seconds for the process, ncu and everything under it.
LIMIT_S = 60.0


def cells() -> list[Cell]:
    """The headline first: if the run is cut short, that is what there is."""
    figure2: dict[str, Any] = {"seqlen": 1024, "head_dim": 64, "batch": 64, "heads": 16}
    square = Tile(64, 64)
    listed = [cell("flash", p, square, **figure2) for p in ("forward", "backward")]
    listed += [cell("flash-deterministic", "backward", square, **figure2)]
    listed += hopper_forwards(False, figure2)
    listed += [cell("flash-sm90", "backward", hopper.backward_form(64, False).tile, **figure2)]
    listed += [
        cell("flash1-released", p, Tile(16, bc), **figure2) for p in ("forward", "backward") for bc in (64, 128, 256)
    ]
    ragged: dict[str, Any] = {"seqlen": 1000, "head_dim": 128, "batch": 4, "heads": 8, "dtype": "bf16"}
    listed += [
        cell("flash", p, square, causal=causal, **ragged) for p in ("forward", "backward") for causal in (False, True)
    ]
    for causal in (False, True):
        listed += hopper_forwards(causal, ragged)
        tile = hopper.backward_form(128, causal).tile
        listed += [cell("flash-sm90", "backward", tile, causal=causal, **ragged)]
    listed += hopper_forwards(True, figure2)
    long: dict[str, Any] = {"head_dim": 128, "dtype": "bf16"}
    listed += [cell("flash", "forward", Tile(128, 64), seqlen=n, **long) for n in (32768, 65536, 131072)]
    listed += [cell("flash", "backward", square, seqlen=32768, **long)]
    listed += [
        cell(name, p, Tile(16, 256), **figure2)
        for name in ("flash1-literal", "flash1-skip-first")
        for p in ("forward", "backward")
    ]
    listed += [cell("standard", p, square, **figure2) for p in ("forward", "backward")]
    return listed


def hopper_forwards(causal: bool, shape: dict[str, Any]) -> list[Cell]:
    """The Hopper forward as its rule runs a shape, and with one block for each tile of that."""
    ruled = hopper.forward_form(shape["head_dim"], causal, shape["seqlen"])
    one_block = hopper.form_of_tile(shape["head_dim"], ruled.tile)
    return [
        cell(f"{hopper.ALGORITHM} {form.name}", "forward", form.tile, causal=causal, **shape)
        for form in (ruled, one_block)
    ]


def predict(one: Cell) -> Iterator[Row]:
    """Per kernel and direction at the SM boundary; HBM reads on an H200 for the whole pass."""
    shape, tile = shape_of(one), tile_of(one)
    algorithm, options = sum_of(str(one["implementation"]))
    pass_ = str(one["pass"])
    traffic = predict_traffic(algorithm, shape, tile, pass_, **options)
    for kernel, entries in traffic.kernels.items():
        for direction, ways in (("read", ("read",)), ("write", ("write", "atomic"))):
            value = sum(count for (_, way), count in entries.items() if way in ways)
            yield _row(kernel, "sm", direction, value, "sum over the tile loop")
    gpu = find_gpu("NVIDIA H200")
    if gpu is not None and not algorithm.startswith("standard"):
        hbm = predict_hbm(algorithm, shape, tile, pass_, gpu, **options)
        yield _row("all", "hbm", "read", hbm.read_bytes, hbm.method)


@cache
def counted() -> Profiled[KernelCount]:
    """The counters of this process' run."""
    from repro.instruments.counted import count_cells

    return Profiled(cells(), count_cells, batch=BATCH, limit_s=LIMIT_S)


def measure(one: Cell, context: Context) -> Iterator[Row]:
    """The counters of every kernel of the cell, and the HBM reads of all together."""
    kernels = counted().kernels(one)
    for kernel in kernels:
        for (level, direction), value in kernel.bytes.items():
            yield _row(kernel.name, level, direction, value, "ncu")
    yield _row("all", "hbm", "read", sum(kernel.bytes["hbm", "read"] for kernel in kernels), "ncu")


def _row(kernel: str, level: str, direction: str, value: int, tool: str) -> Row:
    return row("traffic_bytes", value, tool=tool, kernel=kernel, level=level, direction=direction)


EXPERIMENT = Experiment("gpu-traffic", cells, predict, measure, device="cuda", seconds=seconds_of(len(cells()), BATCH))
