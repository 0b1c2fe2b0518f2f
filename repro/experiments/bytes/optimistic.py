"""The optimistic softmax against the exact one, over inputs made to defeat it.

The optimistic Hopper forward looks for the row maximum in the first key tile it walks and repairs
the tiles that overflow for that. Scores are N(0, 1) plus a drift over the keys: upward in the order
of the walk (the worst case), downward, or one outlier walked last. Predicted: the drift from which
tiles are flagged, and the bytes of both launches. Executed on the host backend: error against
float64, tiles flagged, bytes. What it costs in time is measured by ``gpu-optimistic``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from analysis.optimistic import PATTERNS, flags
from analysis.shapes import AttentionShape
from analysis.traffic import Traffic, predict_traffic
from kernels.hopper_forms import ForwardForm, forward_form
from repro.experiments import Cell, Context, Experiment, Row, row
from repro.experiments.shared.attention import cell_of
from repro.instruments.drift import add_drift

EXACT, OPTIMISTIC = "flash-sm90", "flash-sm90-optimistic"
SEQLEN_K = 1024
SHAPE = AttentionShape(1, 1, 384, SEQLEN_K, 64, dtype="bf16")
NATS = (0, 10, 20, 25, 27, 28, 29, 30, 32, 36, 40, 60, 120, 200)


def cells() -> list[Cell]:
    """The worst case at every drift, the others at a few."""
    return [
        cell_of(SHAPE, name, "forward", pattern=pattern, nats=nats)
        for pattern in PATTERNS
        for nats in (NATS if pattern == PATTERNS[0] else (40, 200))
        for name in (EXACT, OPTIMISTIC)
    ]


def form_of(cell: Cell) -> ForwardForm:
    """The form that both run in."""
    return forward_form(int(cell["head_dim"]), bool(cell["causal"]), int(cell["seqlen_q"]))


def first_key_looked_at(cell: Cell) -> int:
    """The reference is the maximum from this key on: ragged tiles, and the first whole one."""
    keys, block_n = int(cell["seqlen_k"]), form_of(cell).tile.block_n
    return max(keys // block_n - 1, 0) * block_n


def predict(cell: Cell) -> Iterator[Row]:
    """Share of tiles flagged for scores without noise; bytes with that share repaired."""
    form = form_of(cell)
    flagged: tuple[int, ...] = ()
    optimistic = cell["implementation"] == OPTIMISTIC
    if optimistic and flags(str(cell["pattern"]), float(cell["nats"]), SEQLEN_K, first_key_looked_at(cell)):
        flagged = tuple(range(-(-SHAPE.seqlen_q // form.tile.block_m)))
    more = {"flagged": flagged} if optimistic else {}
    traffic = predict_traffic(
        str(cell["implementation"]), SHAPE, form.tile, "forward", persistent=form.persistent, **more
    )
    yield from _rows(traffic, "closed form and sum over the tile loop")


def _rows(traffic: Traffic, tool: str) -> Iterator[Row]:
    """All bytes, and the share of query rows whose tile was done again."""
    total = sum(sum(entries.values()) for entries in traffic.kernels.values())
    yield row("traffic_bytes", total, level="sm", tool=tool)
    repaired = sum(
        entries.get(("out", "write"), 0) for kernel, entries in traffic.kernels.items() if kernel.endswith("_repair")
    )
    yield row("flagged_share", repaired / SHAPE.query_bytes, tool=tool)


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """Execute the kernels: error of out and lse, tiles flagged, bytes."""
    import torch

    from kernels import hopper
    from repro.attention.views import array_of

    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, 1, rows, SHAPE.head_dim), generator=generator).bfloat16()
        for rows in (SHAPE.seqlen_q, SHAPE.seqlen_k, SHAPE.seqlen_k)
    )
    scale = 1 / math.sqrt(SHAPE.head_dim)
    add_drift(q, k, str(cell["pattern"]), float(cell["nats"]), scale)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    backend = context.host()
    hopper.forward(
        backend,
        *(array_of(name, tensor) for name, tensor in arrays.items()),
        scale=scale,
        optimistic=cell["implementation"] == OPTIMISTIC,
        form=form_of(cell),
    )
    counted = Traffic({kernel: dict(entries) for kernel, entries in backend.traffic.items()})
    yield from _rows(counted, "host backend: executed, bytes counted")
    scores = scale * (q.double() @ k.double().mT)
    want = {"out": scores.softmax(-1) @ v.double(), "lse": scores.logsumexp(-1)}
    for name, tensor in (("out", out), ("lse", lse)):
        error = tensor.double() - want[name]
        for metric, value in (("rmse", error.pow(2).mean().sqrt()), ("max_abs_error", error.abs().max())):
            yield row(metric, float(value), tensor=name, tool="against float64 on the same rounded inputs")


EXPERIMENT = Experiment("optimistic", cells, predict, measure, device="host", seconds=30, on_demand=True)
