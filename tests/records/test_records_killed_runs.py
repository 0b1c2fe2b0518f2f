"""A measurement run that is killed at any line goes on to the same records: nothing lost, nothing
twice. (Files cut at every byte are in ``test_records_reliability.py``.)"""

from __future__ import annotations

import json

import pytest

from repro import fuzz, killed_runs
from repro.killed_runs import Case
from repro.measuring import records


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_random_lines_a_run_goes_on_to_the_same_records(seed: int, again: bool) -> None:
    assert killed_runs.failure(Case(seed=seed, again=again)) is None


def test_cases_survive_their_spelling() -> None:
    for seed in range(50):
        case = killed_runs.draw(seed)
        assert Case.from_json(case.to_json()) == case
        for simpler in killed_runs.smaller(case):
            assert simpler != case
    with pytest.raises(TypeError, match="colour"):
        Case.from_json(json.dumps({"colour": 1}))


@pytest.mark.parametrize("fault", ["a line lost", "a cell measured again"])
def test_faults_are_found_and_shrunk(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "a line lost":  # a torn file is started anew
        read = records.read
        monkeypatch.setattr(
            records, "append", lambda path, rows: records.replace(path, {"none"}, rows[:1])
        )
        assert read is records.read
    else:
        monkeypatch.setattr("repro.experiments.run.pending", lambda cells, known, digest: cells)
    small = fuzz.shrink(Case(seed=3, rows=4), "cpu", float("inf"))
    assert fuzz.complaint(small, "cpu")
    assert small.kills <= 2
    assert "--of records --case" in fuzz.command(small, "cpu")
