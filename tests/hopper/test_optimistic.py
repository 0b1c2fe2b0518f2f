"""When the optimistic softmax repairs: the closed form, against sums written out and the kernel."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from analysis import optimistic as theory
from repro.experiments import Context
from repro.experiments.bytes import optimistic
from repro.experiments.bytes.optimistic import EXACT, OPTIMISTIC


def test_the_limit_is_the_kernel_s() -> None:
    header = Path(__file__).parents[2] / "kernels/include/forward_sm90.cuh"
    found = re.search(r"LIMIT = ([\d.]+)f;", header.read_text())
    assert found is not None
    assert float(found[1]) == 2.0**theory.LIMIT_LOG2


def test_sums_by_hand() -> None:
    """Four keys, reference from the last two: scores 3, 2, 1, 0 upward, so the reference is 1."""
    upward = math.log2(sum(math.exp(s - 1) for s in (3, 2, 1, 0)))
    assert theory.log2_of_sum("upward", 3, 4, 2) == pytest.approx(upward)
    downward = math.log2(sum(math.exp(s - 3) for s in (0, 1, 2, 3)))
    assert theory.log2_of_sum("downward", 3, 4, 2) == pytest.approx(downward)
    assert theory.log2_of_sum("outlier", 3, 4, 2) == pytest.approx(math.log2(math.exp(3) + 3))
    assert theory.log2_of_sum("upward", 0, 1024, 896) == pytest.approx(10)
    assert theory.log2_of_sum("upward", 5000, 4, 2) == pytest.approx(5000 / 3 * 2 / math.log(2))


def test_onsets() -> None:
    """One outlier of x nats makes a sum of e^x; a downward drift never passes."""
    assert theory.onset("outlier", 1024, 896) == pytest.approx(40 * math.log(2), abs=1e-5)
    assert theory.onset("downward", 1024, 896) == math.inf
    start = theory.onset("upward", 1024, 896)
    assert theory.flags("upward", start, 1024, 896)
    assert not theory.flags("upward", start - 1e-5, 1024, 896)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sideways", 1, 4, 0), "'sideways' is not one of"),
        (("upward", -1, 4, 0), "-1 nats is negative"),
        (("upward", math.nan, 4, 0), "nan nats"),
        (("upward", 1, 4, 4), "first_key=4 is none of the 4 keys"),
    ],
)
def test_bad_input(arguments: tuple[str, float, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        theory.log2_of_sum(*arguments)


@pytest.mark.parametrize(("pattern", "nats"), [("upward", 0), ("upward", 60), ("outlier", 200)])
def test_a_cell_executed_moves_what_is_predicted(pattern: str, nats: int) -> None:
    """Away from the onset, noise does not matter: bytes and repaired share are equal."""
    for cell in optimistic.cells():
        if (cell["pattern"], cell["nats"]) != (pattern, nats):
            continue
        predicted = {r.metric: r.value for r in optimistic.EXPERIMENT.predicted(cell)}
        measured = list(optimistic.EXPERIMENT.measured(cell, Context("host")))
        counted = {r.metric: r.value for r in measured if r.metric in predicted}
        assert counted == predicted
        assert predicted["flagged_share"] == float(cell["implementation"] == OPTIMISTIC and nats > 0)
        errors = [r.value for r in measured if r.metric == "max_abs_error"]
        assert len(errors) == 2
        assert np.isfinite(errors).all()
        assert max(errors) < 2e-2  # of lse, up to 200 + 7, in fp32, and of out in bf16


def test_both_forms_are_asked_at_every_drift() -> None:
    cells = optimistic.cells()
    assert len({cell.id for cell in cells}) == len(cells)
    for name in (EXACT, OPTIMISTIC):
        assert [c["nats"] for c in cells if c["implementation"] == name][:14] == list(optimistic.NATS)
