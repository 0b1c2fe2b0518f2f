"""The decoding experiment: its cells move what is predicted and compute what is right."""

from __future__ import annotations

import pytest

from analysis.decode import DecodeShape
from repro.experiments import Cell, Context
from repro.experiments import decode_bytes as experiment


def by_tensor(rows: list[experiment.Record]) -> dict[tuple[str | None, ...], float | None]:
    """Bytes of each kernel, tensor and direction."""
    traffic = [row for row in rows if row.metric == "traffic_bytes"]
    return {(row.kernel, row.tensor, row.direction): row.value for row in traffic}


def small(sharing: str) -> Cell:
    """A cell of the list, short and split."""
    cell = next(c for c in experiment.cells() if c["sharing"] == sharing and c["seqlen_q"] == 3)
    return Cell(**{("pass_" if k == "pass" else k): v for k, v in cell.items()}
                | {"seqlen_k": 192, "splits": 2})  # fmt: skip


@pytest.mark.parametrize("sharing", experiment.SHARING)
def test_a_cell_executed_moves_what_is_predicted(sharing: str) -> None:
    cell = small(sharing)
    measured = list(experiment.measure(cell, Context("host")))
    predicted = list(experiment.predict(cell))
    assert by_tensor(measured) == by_tensor(predicted)
    (error,) = [row.value for row in measured if row.metric == "max_abs_error"]
    assert error is not None
    assert error <= 2e-2  # bf16's bound for N(0, 1), tests/attention_support.py
    (bound,) = [row.value for row in predicted if row.metric == "compulsory_bytes"]
    assert bound is not None
    assert sum(value or 0 for value in by_tensor(predicted).values()) > bound


def test_what_sharing_saves() -> None:
    """Bytes of a token's cache, over those of MHA: 1/4, 1/8, 1/32, 1/32."""
    sizes = {}
    for sharing in experiment.SHARING:
        cell = next(c for c in experiment.cells() if c["sharing"] == sharing)
        one = experiment.shape_of(cell)
        assert isinstance(one, DecodeShape)
        sizes[sharing] = one.token_bytes
    assert sizes["mha"] == 2 * 32 * 128 * 2
    ratios = {sharing: sizes["mha"] / size for sharing, size in sizes.items()}
    assert ratios == {"mha": 1, "gqa": 4, "gqa-fp8": 8, "mqa": 32, "latent-256": 32}


def test_theory_has_no_cell() -> None:
    assert not {c["sharing"] for c in experiment.cells()} & set(experiment.THEORY)
    drawn = {row.extra["sharing"] for row in experiment.also()}
    assert set(experiment.THEORY) <= drawn
