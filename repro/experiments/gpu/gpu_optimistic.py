"""Time of the optimistic softmax over score drift, check and repair included, on a Hopper card.

The exact and the optimistic forward take turns on the same operands: N(0, 1) with an upward drift
added (``repro.experiments.bytes.optimistic``), from none, where nothing is flagged, to 200 nats,
where every tile is computed twice. 16,384 tokens, hidden size 2,048, bf16.
"""

from __future__ import annotations

import math

from repro.experiments import Cell, Context, Experiment, UnavailableError
from repro.experiments.bytes.optimistic import EXACT, OPTIMISTIC
from repro.experiments.shared.attention import shape_of
from repro.instruments.drift import add_drift
from repro.measuring.records import Record, record

NAME = "gpu-optimistic"
TOKENS, HIDDEN = 16384, 2048
NATS = (0, 20, 60, 200)
BUDGET_MS = 40.0


def cells() -> list[Cell]:
    """No drift and full repair first: the gain and the worst loss."""
    return [
        Cell(
            pass_="forward",
            batch=TOKENS // seqlen,
            heads=HIDDEN // head_dim,
            kv_heads=HIDDEN // head_dim,
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            head_dim=head_dim,
            dtype="bf16",
            causal=False,
            pattern="upward",
            nats=nats,
        )
        for nats in sorted(NATS, key=lambda nats: -abs(nats - 50))
        for seqlen in (16384, 2048)
        for head_dim in (128, 64)
    ]


def predict(cell: Cell) -> list[Record]:
    """None: the two differ in instructions, and the time model has no ceiling for those."""
    return []


def measure(cell: Cell, context: Context) -> list[Record]:
    """Milliseconds of both, in turn."""
    import torch

    from repro.instruments.gpu_work import Operands, work
    from repro.instruments.timing import TorchDevice, time_interleaved

    if torch.cuda.get_device_capability()[0] != 9:
        raise UnavailableError("the optimistic softmax needs compute capability 9.0")
    operands = Operands(shape_of(cell))
    add_drift(operands.q, operands.k, str(cell["pattern"]), float(cell["nats"]), 1 / math.sqrt(float(cell["head_dim"])))
    works = {name: work(name, "forward", operands) for name in (EXACT, OPTIMISTIC)}
    for call in works.values():
        call()
    return [
        record(
            cell,
            experiment=NAME,
            implementation=name,
            source="measured",
            metric="time_ms",
            value=timing.median_ms,
            unit="ms",
            spread_min=timing.min_ms,
            spread_max=timing.max_ms,
            spread_n=timing.repeats,
            tool="CUDA events, median, in turn, L2 flushed",
        )
        for name, timing in time_interleaved(works, TorchDevice(), budget_ms=BUDGET_MS).items()
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="time of the optimistic softmax over score drift",
    cells=cells,
    predict=predict,
    measure=measure,
    device="cuda",
    seconds=15,
)
