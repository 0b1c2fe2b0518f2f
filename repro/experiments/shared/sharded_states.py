"""Model states of data-parallel training: bytes a rank holds and sends, by engine (ZeRO 2020).

torch's engines on 2 and 4 gloo ranks of this CPU under torchrun; the same script uses NCCL on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis.model_states import model_state_bytes, step_sent_bytes
from repro.experiments import Cell, Context, Row, row

NAME = "several-ranks"
PART = "sharded-states"
RANKS = (2, 4)
PARAMETERS = 768 * 768 * 12  # repro.distributed.measure.chain: a layer of GPT-2 small
#: engine -> (schedule, ZeRO stage of what it holds between steps, bytes a parameter p, g, o)
ENGINES: dict[str, tuple[str, int, tuple[int, int, int]]] = {
    "data-parallel": ("data-parallel", 0, (2, 2, 12)),
    "torch-zero-1": ("torch-zero-1", 1, (2, 2, 12)),
    "zero-2-by-parameter": ("zero-2-by-parameter", 2, (2, 2, 12)),
    "fsdp2-zero-2": ("zero-2", 3, (4, 4, 8)),
    "fsdp2-zero-3": ("zero-3", 3, (4, 4, 8)),
}


def cells() -> list[Cell]:
    """Every engine on every number of ranks."""
    return [
        Cell(part=PART, implementation=engine, ranks=ranks, parameters=PARAMETERS)
        for ranks in RANKS
        for engine in ENGINES
    ]


def predict(cell: Cell) -> Iterator[Row]:
    """Bytes held by kind, and bytes sent in a step."""
    ranks = int(cell["ranks"])
    schedule, stage, sizes = ENGINES[str(cell["implementation"])]
    held = model_state_bytes(
        PARAMETERS, ranks, stage, parameter_bytes=sizes[0], gradient_bytes=sizes[1], optimizer_bytes=sizes[2]
    )
    values = {
        "parameter_bytes": held.parameters,
        "gradient_bytes": held.gradients,
        "optimizer_bytes": held.optimizer,
        "sent_bytes": step_sent_bytes(schedule, PARAMETERS, 2, ranks),
    }
    for metric, value in values.items():
        yield row(metric, value)


def measure(cell: Cell, context: Context) -> list[Row]:
    """Counted on the rank that holds or sends most."""
    from repro.distributed.launch import records_of

    rows = records_of(NAME, PART, int(cell["ranks"]), {"implementation": cell["implementation"]})
    return [found | {"tool": "storages and collectives counted"} for found in rows]
