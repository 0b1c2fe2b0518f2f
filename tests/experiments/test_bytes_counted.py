"""Cells of the byte experiments, executed: what is counted is what is predicted, to the byte, and
what is computed is right."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

import pytest

from repro.experiments import Cell, Context
from repro.experiments.bytes import bias_bytes, block_sparse, decode_bytes, fp8_bytes, packed_sequences, sliding_window
from repro.experiments.checkpointing import checkpoint_attention
from repro.measuring.records import Record

BOTH = ("forward", "backward")


def short(sharing: str) -> Cell:
    """A step of decoding from the list, short and split."""
    cell = next(c for c in decode_bytes.cells() if c["sharing"] == sharing and c["seqlen_q"] == 3)
    return Cell(**{("pass_" if k == "pass" else k): v for k, v in cell.items()} | {"seqlen_k": 192, "splits": 2})


CELLS: list[tuple[ModuleType, Cell]] = [
    *((bias_bytes, bias_bytes.point("flash", scores, pass_, 160)) for scores in bias_bytes.SCORES for pass_ in BOTH),
    *(
        (sliding_window, sliding_window.point(way, pass_, 300, 40))
        for way in ("window", "stored mask", "standard")
        for pass_ in BOTH
    ),
    *(
        (packed_sequences, packed_sequences.point("squad-1.1", way, pass_, 2, 4))
        for way in ("packed", "longest")
        for pass_ in BOTH
    ),
    *((block_sparse, block_sparse.point("butterfly", pass_, 256)) for pass_ in BOTH),
    *((fp8_bytes, cell) for cell in fp8_bytes.cells() if cell.get("outlier") is None and cell["seqlen_q"] == 64),
    *((decode_bytes, short(sharing)) for sharing in decode_bytes.SHARING),
    *(
        (checkpoint_attention, cell)
        for cell in checkpoint_attention.cells()
        if cell["seqlen_q"] == min(checkpoint_attention.COUNTED)
    ),
]


def by_tensor(rows: Iterable[Record]) -> dict[tuple[str | None, ...], float]:
    """Bytes of each kernel, tensor and direction."""
    found: dict[tuple[str | None, ...], float] = {}
    for row in rows:
        if row.metric == "traffic_bytes":
            assert row.value is not None
            key = (row.kernel, row.tensor, row.direction)
            found[key] = found.get(key, 0) + row.value
    return found


@pytest.mark.parametrize(
    ("experiment", "cell"),
    CELLS,
    ids=[f"{module.EXPERIMENT.name}-{number}" for number, (module, _) in enumerate(CELLS)],
)
def test_a_cell_executed_moves_what_is_predicted(experiment: ModuleType, cell: Cell) -> None:
    measured = list(experiment.EXPERIMENT.measured(cell, Context("host")))
    assert by_tensor(measured) == by_tensor(experiment.EXPERIMENT.predicted(cell))
    errors = [row for row in measured if row.metric in ("max_abs_error", "rounding_error")]
    assert errors
    # The bounds of N(0, 1) inputs by type; in e4m3 the numbers themselves are rounded.
    for row in errors:
        limit = 2e-2 if row.dtype == "bf16" or row.metric == "rounding_error" else 5e-3
        assert row.value is not None
        assert row.value <= limit


def test_scales_are_read_where_there_are_any() -> None:
    (plain, *scaled) = [c for m, c in CELLS if m is fp8_bytes]
    assert plain["way"] == "16 bits"
    for cell in (plain, *scaled):
        read = ("flash_forward", "k_scale", "read") in by_tensor(fp8_bytes.EXPERIMENT.predicted(cell))
        assert read == (cell is not plain)
