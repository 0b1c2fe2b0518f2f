"""The experiment with a stored bias: its cells move what is predicted and compute what is right."""

from __future__ import annotations

import pytest

from repro.experiments.bytes import bias_bytes as experiment


def test_a_bias_is_quadratic_where_nothing_else_is() -> None:
    """Each tensor once: twice the sequence, twice the bytes; with a bias, four times in the end."""
    ratios = {}
    for scores in experiment.SCORES:
        least = []
        for seqlen in (16384, 32768):
            rows = list(experiment.EXPERIMENT.predicted(experiment.point("flash", scores, "forward", seqlen)))
            least += [row.value for row in rows if row.metric == "compulsory_bytes"]
        assert None not in least
        ratios[scores] = least[1] / least[0]  # type: ignore[operator]
    assert ratios["plain"] == 2.0
    assert ratios["alibi"] == pytest.approx(2.0, rel=1e-6)
    assert ratios["bias"] > 3.9


def test_standard_attention_reads_the_bias_once_and_is_not_executed() -> None:
    assert {one["implementation"] for one in experiment.cells()} == {"flash"}
    for pass_, more in (("forward", 1), ("backward", 0)):
        with_bias, without = (
            experiment.traffic_of(experiment.point("standard", scores, pass_, 256)).total_bytes
            for scores in ("bias", "plain")
        )
        assert with_bias - without == more * experiment.HEADS * 256 * 256 * 2
