"""Time of the optimistic softmax over score drift, check and repair included, on a Hopper card.

The exact and the optimistic forward take turns on the same operands: N(0, 1) with an upward drift
added (``repro.experiments.bytes.optimistic``), from none, where nothing is flagged, to 200 nats,
where every tile is computed twice. 16,384 tokens, hidden size 2,048, bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.experiments import Cell, Context, Experiment, Row, UnavailableError
from repro.experiments.bytes.optimistic import EXACT, OPTIMISTIC
from repro.experiments.gpu.gpu_throughput import of_tokens
from repro.experiments.shared.attention import shape_of
from repro.instruments.drift import add_drift

NATS = (0, 20, 60, 200)
BUDGET_MS = 40.0


def cells() -> list[Cell]:
    """No drift and full repair first: the gain and the worst loss."""
    return [
        of_tokens(None, "forward", seqlen, head_dim, pattern="upward", nats=nats)
        for nats in sorted(NATS, key=lambda nats: -abs(nats - 50))
        for seqlen in (16384, 2048)
        for head_dim in (128, 64)
    ]


def measure(cell: Cell, context: Context) -> Iterator[Row]:
    """Milliseconds of both, in turn."""
    import torch

    from repro.instruments.gpu_work import Operands, work
    from repro.instruments.timing import IN_TURN, TorchDevice, time_interleaved

    if torch.cuda.get_device_capability()[0] != 9:
        raise UnavailableError("the optimistic softmax needs compute capability 9.0")
    operands = Operands(shape_of(cell))
    add_drift(operands.q, operands.k, str(cell["pattern"]), float(cell["nats"]), 1 / math.sqrt(float(cell["head_dim"])))
    works = {name: work(name, "forward", operands) for name in (EXACT, OPTIMISTIC)}
    for call in works.values():
        call()
    for name, timing in time_interleaved(works, TorchDevice(), budget_ms=BUDGET_MS).items():
        yield timing.row(IN_TURN, implementation=name)


EXPERIMENT = Experiment("gpu-optimistic", cells, measure=measure, device="cuda", seconds=15)
