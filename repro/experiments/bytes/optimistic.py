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
from typing import TYPE_CHECKING

from analysis.optimistic import PATTERNS, flags
from analysis.traffic import Traffic, predict_traffic
from kernels.hopper_forms import ForwardForm, forward_form
from repro.experiments import Cell, Context, Experiment
from repro.experiments.shared.attention import TRAFFIC, shape_of
from repro.instruments.drift import add_drift
from repro.measuring.records import Record, record

if TYPE_CHECKING:
    pass

NAME = "optimistic"
EXACT, OPTIMISTIC = "flash-sm90", "flash-sm90-optimistic"
SEQLEN_Q, SEQLEN_K, HEAD_DIM = 384, 1024, 64
NATS = (0, 10, 20, 25, 27, 28, 29, 30, 32, 36, 40, 60, 120, 200)


def cells() -> list[Cell]:
    """The worst case at every drift, the others at a few."""
    return [
        Cell(
            implementation=name,
            pass_="forward",
            batch=1,
            heads=1,
            kv_heads=1,
            seqlen_q=SEQLEN_Q,
            seqlen_k=SEQLEN_K,
            head_dim=HEAD_DIM,
            dtype="bf16",
            causal=False,
            pattern=pattern,
            nats=nats,
        )
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


def predict(cell: Cell) -> Iterator[Record]:
    """Share of tiles flagged for scores without noise; bytes with that share repaired."""
    shape, form = shape_of(cell), form_of(cell)
    keys = int(cell["seqlen_k"])
    flagged: tuple[int, ...] = ()
    optimistic = cell["implementation"] == OPTIMISTIC
    if optimistic and flags(str(cell["pattern"]), float(cell["nats"]), keys, first_key_looked_at(cell)):
        flagged = tuple(range(-(-shape.seqlen_q // form.tile.block_m)))
    more = {"flagged": flagged} if optimistic else {}
    traffic = predict_traffic(
        str(cell["implementation"]), shape, form.tile, "forward", persistent=form.persistent, **more
    )
    yield from _rows(cell, traffic, "predicted", "closed form and sum over the tile loop")


def _rows(cell: Cell, traffic: Traffic, source: str, tool: str) -> Iterator[Record]:
    """All bytes, and the share of query rows whose tile was done again."""
    total = sum(sum(entries.values()) for entries in traffic.kernels.values())
    yield record(cell, experiment=NAME, source=source, tool=tool, value=total, **TRAFFIC)
    repaired = sum(
        entries.get(("out", "write"), 0) for kernel, entries in traffic.kernels.items() if kernel.endswith("_repair")
    )
    yield record(
        cell,
        experiment=NAME,
        source=source,
        tool=tool,
        metric="flagged_share",
        unit="1",
        value=repaired / shape_of(cell).query_bytes,
    )


def measure(cell: Cell, context: Context) -> Iterator[Record]:
    """Execute the kernels: error of out and lse, tiles flagged, bytes."""
    import torch

    from kernels import hopper
    from repro.attention.views import array_of

    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, 1, int(cell[n]), HEAD_DIM), generator=generator).bfloat16()
        for n in ("seqlen_q", "seqlen_k", "seqlen_k")
    )
    scale = 1 / math.sqrt(HEAD_DIM)
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
    yield from _rows(cell, counted, "measured", "host backend: executed, bytes counted")
    scores = scale * (q.double() @ k.double().mT)
    want = {"out": scores.softmax(-1) @ v.double(), "lse": scores.logsumexp(-1)}
    for name, tensor in (("out", out), ("lse", lse)):
        error = tensor.double() - want[name]
        for metric, value in (("rmse", error.pow(2).mean().sqrt()), ("max_abs_error", error.abs().max())):
            yield record(
                cell,
                experiment=NAME,
                source="measured",
                metric=metric,
                unit="1",
                tensor=name,
                value=float(value),
                tool="against float64 on the same rounded inputs",
            )


EXPERIMENT = Experiment(
    name=NAME,
    title="optimistic softmax over score drift",
    cells=cells,
    predict=predict,
    measure=measure,
    device="host",
    seconds=30,
    on_demand=True,
)
