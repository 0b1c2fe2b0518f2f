"""A step of attention under torch's checkpoint moves what the sums say: the forward twice."""

import pytest

from repro.experiments import Context
from repro.experiments.checkpointing import checkpoint_attention as experiment


@pytest.mark.parametrize("algorithm", experiment.ALGORITHMS)
def test_a_checkpointed_step_is_counted_and_as_predicted(algorithm: str) -> None:
    (cell,) = (c for c in experiment._steps((256,)) if c["implementation"] == algorithm)
    rows = experiment.EXPERIMENT.measured(cell, Context(device="host"))
    counted = {(r.kernel, r.tensor, r.direction): r.value for r in rows if r.metric == "traffic_bytes"}
    assert counted == {(r.kernel, r.tensor, r.direction): r.value for r in experiment.EXPERIMENT.predicted(cell)}
    (error,) = (r.value for r in rows if r.metric == "max_abs_error")
    assert error is not None
    assert error < 5e-3  # of results of size 1 in fp16, 256 keys
