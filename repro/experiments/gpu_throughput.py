"""Throughput against sequence length, ours and the peers in turn, as FA-2 and FA-3 draw it.

16,384 tokens, hidden size 2,048 (32 heads of 64 or 16 of 128), bf16, N = 512 … 16k, causal or not,
forward and backward. All implementations of a cell take turns in every round, because a card under
load changes its clock: only their ratios within a round can be compared. FLOPs are the papers'
count: 4 N² d per head forward, half of it causal, 2.5 times it backward.

Last come cells of the forms of the Hopper kernels, each against the others: they say whether the
rules that pick one (``kernels.hopper.forward_form``, ``backward_form``) pick the right one on this
card.
"""

from __future__ import annotations

from collections.abc import Collection

from analysis.hardware import H100_SXM, H200, Gpu
from analysis.shapes import Tile
from analysis.time_model import (
    TimePrediction,
    attention_work,
    datasheet_ceilings,
    predict_time,
)
from kernels import hopper
from kernels.dispatch import default_tile
from repro.experiments import Cell, Context, Experiment
from repro.experiments._attention import shape_of
from repro.prediction import form_of, shared_per_tensor, sum_options
from repro.records import Record, record

NAME = "gpu-throughput"
TOKENS, HIDDEN = 16384, 2048
CARDS = (H100_SXM, H200)
#: Ours by kernel, not by what the operator would choose: both forms run on every card they can.
OURS = ("flash", "flash-sm90")
CHAINED = "flash-sm90-chained"
#: Its backward is that of the exact form.
FORWARD_ONLY = ("flash-sm90-optimistic",)
#: Their forward is that of the exact or the chained form.
BACKWARD_ONLY = ("flash-sm90-deterministic", "flash-sm90-deterministic-chained")
IMPLEMENTATIONS = (*OURS, CHAINED, *FORWARD_ONLY, *BACKWARD_ONLY, "sdpa-flash", "sdpa-cudnn")
#: Milliseconds of timed work for each implementation of a cell.
BUDGET_MS = 40.0


def cells() -> list[Cell]:
    """Longest and shortest sequences first, so that a cut run still spans the range."""
    listed = []
    for seqlen in (16384, 2048, 512, 8192, 4096, 1024):
        for head_dim in (128, 64):
            for causal in (False, True):
                for pass_ in ("forward", "backward"):
                    heads = HIDDEN // head_dim
                    listed.append(
                        Cell(
                            pass_=pass_, batch=TOKENS // seqlen, heads=heads, kv_heads=heads,
                            seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, dtype="bf16",
                            causal=causal,
                        )
                    )  # fmt: skip
    return listed + form_cells()


def form_cells() -> list[Cell]:
    """The forms of a pass in turn, head_dim 256 of the forward among them: the ends of the rules
    first."""
    return [
        Cell(
            pass_=pass_, batch=TOKENS // seqlen, heads=HIDDEN // head_dim,
            kv_heads=HIDDEN // head_dim, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim,
            dtype="bf16", causal=causal, forms=True,
        )
        for seqlen in (2048, 16384, 4096, 8192)
        for pass_, head_dims in (("backward", (128, 64)), ("forward", (128, 64, 256)))
        for head_dim in head_dims
        for causal in (False, True)
    ]  # fmt: skip


def implementations(one: Cell) -> tuple[str, ...]:
    """What takes turns in a cell."""
    if one.get("forms"):
        kind = hopper.ForwardForm if one["pass"] == "forward" else hopper.BackwardForm
        return tuple(
            name for name, form in hopper.FORMS.items()
            if isinstance(form, kind) and form.head_dim == one["head_dim"]
        )  # fmt: skip
    left_out = FORWARD_ONLY if one["pass"] == "backward" else BACKWARD_ONLY
    return tuple(name for name in IMPLEMENTATIONS if name not in left_out)


def predict(one: Cell) -> list[Record]:
    """The time model's bound of our kernels on the cards they may be measured on.

    From datasheets: a library's matrix product, which could be a measured ceiling, draws so much
    power that attention runs faster. Forms differ in what they overlap, which the bound does not
    know: their cells have none.
    """
    if one.get("forms"):
        return []
    return [row for gpu in CARDS for row in _bounds(one, gpu)]


def _bounds(one: Cell, gpu: Gpu) -> list[Record]:
    rows = []
    for name in OURS:
        bound, tile = time_bound(one, name, gpu)
        rows.append(
            record(
                one, experiment=NAME, implementation=name, source="predicted",
                metric="throughput_tflops", unit="TFLOP/s", device=gpu.name,
                block_m=tile.block_m, block_n=tile.block_n,
                value=paper_flops(one) / bound.seconds / 1e12,
                tool=f"ceilings, {datasheet_ceilings(gpu).origin}",
            )
        )  # fmt: skip
    return rows


def time_bound(
    one: Cell, name: str, gpu: Gpu, *, without: Collection[str] = ()
) -> tuple[TimePrediction, Tile]:
    """The bound of an algorithm of ``OURS`` for a cell, and the tile it runs with.

    without: ceilings to leave out.
    """
    shape, pass_ = shape_of(one), str(one["pass"])
    tile = default_tile(
        name, shape.head_dim, shape.dtype, pass_, causal=shape.causal, seqlen_q=shape.seqlen_q
    )
    options = sum_options(form_of(name, shape, pass_))
    shared = shared_per_tensor(name, shape, tile, pass_, gpu)
    work = attention_work(name, shape, tile, pass_, gpu, shared_per_tensor=shared, **options)
    return predict_time(work, datasheet_ceilings(gpu), without=without), tile


def paper_flops(one: Cell) -> float:
    """FLOPs as FlashAttention-2 counts them (§4.1): half for causal, whatever the tiles execute."""
    shape = shape_of(one)
    forward = 4 * shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k * shape.head_dim
    return forward * (0.5 if shape.causal else 1.0) * (2.5 if one["pass"] == "backward" else 1.0)


def measure(one: Cell, context: Context) -> list[Record]:
    """Time and throughput of every implementation that runs; the others' refusals as rows."""
    from repro.instruments.gpu_work import Operands, Work, work
    from repro.instruments.timing import TorchDevice, time_interleaved

    shape, pass_ = shape_of(one), str(one["pass"])
    operands = Operands(shape)
    works: dict[str, Work] = {}
    rows = []
    for name in implementations(one):
        try:
            works[name] = work(name, pass_, operands)
            works[name]()
        except (RuntimeError, ValueError, TypeError) as error:
            works.pop(name, None)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            rows.append(
                record(
                    one, experiment=NAME, implementation=name, source="measured",
                    metric="time_ms", error=reason,
                )
            )  # fmt: skip
    flops = paper_flops(one)
    times = time_interleaved(works, TorchDevice(), budget_ms=BUDGET_MS)
    for name, timing in times.items():
        spread = {"spread_n": timing.repeats, "tool": "CUDA events, median, in turn, L2 flushed"}
        rows.append(
            record(
                one, experiment=NAME, implementation=name, source="measured", metric="time_ms",
                value=timing.median_ms, unit="ms", spread_min=timing.min_ms,
                spread_max=timing.max_ms, **spread,
            )
        )  # fmt: skip
        rows.append(
            record(
                one, experiment=NAME, implementation=name, source="measured",
                metric="throughput_tflops", unit="TFLOP/s",
                value=flops / timing.median_ms / 1e9, spread_min=flops / timing.max_ms / 1e9,
                spread_max=flops / timing.min_ms / 1e9, **spread,
            )
        )  # fmt: skip
    return rows


EXPERIMENT = Experiment(
    name=NAME,
    title="throughput, ours and the peers in turn",
    cells=cells,
    predict=predict,
    measure=measure,
    device="cuda",
    seconds=140,
)
