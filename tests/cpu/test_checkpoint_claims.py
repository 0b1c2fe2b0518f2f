"""Verdicts are computed: open without data, and turned over by data that contradict them."""

from collections.abc import Callable

import pandas
import pytest

from repro.claims import Claim
from repro.claims import checkpointing as claims
from repro.experiments import experiment
from repro.records import Record, frame

JUDGED: dict[Callable[[pandas.DataFrame], Claim], str] = {
    claims.agreement: "checkpoint-depth",
    claims.k6: "checkpoint-depth",
    claims.k7: "checkpoint-depth",
    claims.chen_memory: "checkpoint-depth",
    claims.chen_time: "checkpoint-depth",
    claims.k10: "checkpoint-depth",
    claims.optimum: "checkpoint-pareto",
    claims.k11: "checkpoint-pareto",
    claims.k8: "checkpoint-pareto",
    claims.granularity: "checkpoint-granularity",
    claims.k14: "checkpoint-granularity",
    claims.korthikanti: "checkpoint-layer-bytes",
    claims.redundant_checkpoint: "checkpoint-attention",
    claims.k16: "checkpoint-attention",
}
_predicted: dict[str, list[Record]] = {}


def predicted(name: str) -> list[Record]:
    if name not in _predicted:
        known = experiment(name)
        _predicted[name] = [r for cell in known.cells() for r in known.predict(cell)]
        _predicted[name] += known.also() if known.also else ()
    return _predicted[name]


@pytest.mark.parametrize("judge", JUDGED, ids=lambda judge: judge.__name__)
def test_nothing_is_claimed_without_measurements(judge: Callable) -> None:
    found = judge(frame(predicted(JUDGED[judge])))
    assert found.verdict.startswith("open")
    assert "nan" not in f"{found.predicted}{found.statement}".lower()


def measured(name: str, factor: Callable[[Record], float] = lambda record: 1.0) -> pandas.DataFrame:
    """A frame whose measurements are the predictions times a factor."""
    rows = list(predicted(name))
    for row in predicted(name):
        assert row.value is not None
        made = row.to_json() | {"source": "measured", "value": row.value * factor(row)}
        rows.append(Record.from_json(made))
        if row.metric == "peak_bytes":
            made = row.to_json() | {"source": "measured", "metric": "profiled_peak_bytes"}
            rows.append(Record.from_json(made))
    for row in [r for r in rows if r.implementation == "store-all" and r.source == "measured"]:
        twin = row.to_json() | {"implementation": "autograd"}
        rows.append(Record.from_json(twin))
        rows.append(Record.from_json(twin | {"metric": "forward_share", "value": 1 / 3}))
    return frame(rows)


def test_verdicts_on_measurements_that_are_as_predicted() -> None:
    depth = measured("checkpoint-depth")
    pareto = measured("checkpoint-pareto")
    layers = measured("checkpoint-granularity")
    assert claims.agreement(depth).verdict == "holds"
    assert claims.k6(depth).verdict.startswith("holds")
    assert claims.chen_memory(depth).verdict == "open: not measured"  # autograd at 1,024 layers
    assert claims.k7(depth).verdict.startswith("does not hold")
    assert claims.k10(depth).verdict.startswith("does not hold")
    assert claims.chen_time(depth).verdict.startswith("holds")
    assert claims.optimum(pareto).verdict == "holds"
    assert claims.k11(pareto).verdict.startswith("holds")
    assert claims.granularity(layers).verdict.startswith("does not hold")
    assert claims.k14(layers).verdict.startswith("does not hold")
    assert claims.korthikanti(measured("checkpoint-layer-bytes")).verdict == "holds"
    attention = measured("checkpoint-attention")
    assert claims.redundant_checkpoint(attention).verdict == "holds"
    assert claims.k16(attention).verdict.startswith("holds within limits")


def test_verdicts_turn_over() -> None:
    def grown(record: Record) -> float:
        """Every peak as if it grew with depth."""
        return float(record.extra["depth"]) if record.metric == "peak_bytes" else 1.0

    depth = measured("checkpoint-depth", grown)
    assert claims.agreement(depth).verdict.startswith("does not hold")
    assert claims.k6(depth).verdict.startswith("does not hold")

    def flat(record: Record) -> float:
        """Exponential spacing that needs the same at every depth."""
        if record.implementation != "exponential" or record.metric != "peak_bytes":
            return 1.0
        assert record.value is not None
        return 1e6 / record.value

    assert claims.k7(measured("checkpoint-depth", flat)).verdict == "holds"

    def slow(record: Record) -> float:
        return 2.0 if record.metric == "relative_time" and record.implementation in (
            "sqrt", "chen-search",
        ) else 1.0  # fmt: skip

    assert claims.chen_time(measured("checkpoint-depth", slow)).verdict.startswith("does not hold")

    def saves_more(record: Record) -> float:
        return 0.5 if record.extra.get("mode") == "reentrant" else 1.0

    layers = measured("checkpoint-granularity", saves_more)
    assert claims.k14(layers).verdict.startswith("holds")

    def off(record: Record) -> float:
        return 1.1

    assert claims.korthikanti(measured("checkpoint-layer-bytes", off)).verdict == "does not hold"
    above = measured("checkpoint-pareto", lambda record: 1.5)
    assert claims.optimum(above).verdict.startswith("does not hold")
