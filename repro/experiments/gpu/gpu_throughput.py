"""Throughput against sequence length, ours and the peers in turn, as FA-2 and FA-3 draw it.

16,384 tokens, hidden size 2,048 (32 heads of 64 or 16 of 128), bf16, N = 512 … 16k, causal or not,
forward and backward. All implementations of a cell take turns in every round, because a card under
load changes its clock: only their ratios within a round can be compared. FLOPs are the papers'
count: 4 N² d per head forward, half of it causal, 2.5 times it backward.

The results of two heads are held against float64: a time of an implementation that is further off
than twice the best competing one is not a time of attention, and becomes a row that says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from analysis.algorithms import PDL
from analysis.flops import paper_flops
from analysis.hardware import H100_SXM, H200, Gpu
from analysis.shapes import AttentionShape, Tile
from analysis.time_model import TimePrediction, attention_work, datasheet_ceilings, predict_time
from kernels.dispatch import default_tile
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell_of, shape_of
from repro.prediction import form_of, shared_per_tensor, sum_options

TOKENS, HIDDEN = 16384, 2048
CARDS = (H100_SXM, H200)
#: Ours by kernel, not by what the operator would choose: both forms run on every card they can.
OURS = ("flash", "flash-sm90")
EARLY = f"flash-sm90{PDL}"
#: Its backward is that of the exact form.
FORWARD_ONLY = ("flash-sm90-optimistic",)
#: Their forward is that of the exact form, launched early or not.
BACKWARD_ONLY = ("flash-sm90-deterministic", f"flash-sm90-deterministic{PDL}")
IMPLEMENTATIONS = (*OURS, EARLY, *FORWARD_ONLY, *BACKWARD_ONLY, "sdpa-flash", "sdpa-cudnn")
#: Milliseconds of timed work for each implementation of a cell.
BUDGET_MS = 40.0


def of_tokens(
    implementation: str | None,
    pass_: str,
    seqlen: int,
    head_dim: int,
    tile: Tile | None = None,
    *,
    dtype: str = "bf16",
    causal: bool = False,
    **more: Any,
) -> Cell:
    """A cell of 16,384 tokens and hidden size 2,048."""
    batch, heads = TOKENS // seqlen, HIDDEN // head_dim
    shape = AttentionShape(batch, heads, seqlen, seqlen, head_dim, dtype=dtype, causal=causal)
    return cell_of(shape, implementation, pass_, tile, **more)


def cells() -> list[Cell]:
    """Longest and shortest sequences first, so that a cut run still spans the range."""
    return [
        of_tokens(None, pass_, seqlen, head_dim, causal=causal)
        for seqlen in (16384, 2048, 512, 8192, 4096, 1024)
        for head_dim in (128, 64)
        for causal in (False, True)
        for pass_ in ("forward", "backward")
    ]


def implementations(one: Cell) -> tuple[str, ...]:
    """What takes turns in a cell."""
    left_out = FORWARD_ONLY if one["pass"] == "backward" else BACKWARD_ONLY
    return tuple(name for name in IMPLEMENTATIONS if name not in left_out)


def predict(one: Cell) -> Iterator[Row]:
    """The time model's bound of our kernels on the cards they may be measured on.

    From datasheets: a library's matrix product, which could be a measured ceiling, draws so much
    power that attention runs faster.
    """
    flops = paper_flops(shape_of(one), str(one["pass"]))
    for gpu in CARDS:
        tool = f"ceilings, {datasheet_ceilings(gpu).origin}"
        for name in OURS:
            bound, tile = time_bound(one, name, gpu)
            rate = flops / bound.seconds / 1e12
            by = {"implementation": name, "device": gpu.name, "block_m": tile.block_m, "block_n": tile.block_n}
            yield row("throughput_tflops", rate, tool=tool, **by)


def time_bound(one: Cell, name: str, gpu: Gpu, *, without: Collection[str] = ()) -> tuple[TimePrediction, Tile]:
    """The bound of an algorithm of ``OURS`` for a cell, and the tile it runs with.

    without: ceilings to leave out.
    """
    shape, pass_ = shape_of(one), str(one["pass"])
    tile = default_tile(name, shape.head_dim, shape.dtype, pass_, causal=shape.causal, seqlen_q=shape.seqlen_q)
    options = sum_options(form_of(name, shape, pass_))
    shared = shared_per_tensor(name, shape, tile, pass_, gpu)
    work = attention_work(name, shape, tile, pass_, gpu, shared_per_tensor=shared, **options)
    return predict_time(work, datasheet_ceilings(gpu), without=without), tile


def measure(one: Cell, context: Context) -> list[Row]:
    """Time and throughput of every implementation that runs and is right; the others' reasons."""
    return measure_in_turn(one, implementations(one))


def measure_in_turn(one: Cell, names: Sequence[str]) -> list[Row]:
    """The rows of implementations that take turns on the same operands."""
    from repro.instruments import exact, gpu_work
    from repro.instruments.timing import IN_TURN, TorchDevice, time_interleaved

    shape, pass_ = shape_of(one), str(one["pass"])
    operands = gpu_work.Operands(shape)
    works: dict[str, gpu_work.Pass] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            works[name] = gpu_work.work(name, pass_, operands)
            works[name]()
        except (RuntimeError, ValueError, TypeError) as error:
            works.pop(name, None)
            refused[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
    times = time_interleaved(works, TorchDevice(), budget_ms=BUDGET_MS)
    found = exact.errors(works, operands, pass_)
    peers = [found[name] for name in works if name not in gpu_work.OURS]
    for name in works:
        if name in gpu_work.OURS:
            wrong = found[name].beyond(peers)
            if wrong is not None:
                refused[name] = f"wrong: {wrong}"

    rows = [row("time_ms", error=reason, implementation=name) for name, reason in refused.items()]
    flops = paper_flops(shape, pass_)
    for name, timing in times.items():
        worst = sum(found[name].worst.values())  # a NaN among them stays one
        if math.isfinite(worst):
            largest = max(found[name].worst.values())
            rows.append(row("max_error", largest, implementation=name, tool="two heads against float64"))
        if name in refused:
            continue
        rate = flops / timing.median_ms / 1e9
        rates: dict[str, Any] = {"spread_min": flops / timing.max_ms / 1e9, "spread_max": flops / timing.min_ms / 1e9}
        rates |= {"spread_n": timing.repeats, "tool": IN_TURN, "implementation": name}
        rows += [timing.row(IN_TURN, implementation=name), row("throughput_tflops", rate, **rates)]
    return rows


def seconds_of(listed: Sequence[Cell], each: Callable[[Cell], int]) -> float:
    """Rough time of cells whose ``each`` implementations take turns: twice what is timed, for
    warming up and flushing L2 between, and a fifth of a second for operands and the check."""
    return sum(0.2 + 2 * each(one) * BUDGET_MS / 1e3 for one in listed)


EXPERIMENT = Experiment(
    "gpu-throughput",
    cells,
    predict,
    measure,
    device="cuda",
    seconds=seconds_of(cells(), lambda one: len(implementations(one))),
)
