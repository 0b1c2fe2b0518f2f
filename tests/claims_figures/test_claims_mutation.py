"""Every verdict can fail: records changed beyond the tolerance change it, dropped ones take it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas
import pytest

from repro.claims import Claim, Evidence, Finding, Verdict, rows
from repro.claims.mutations import Scale
from repro.claims.values import formula_off
from repro.experiments import tidy

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(rows())
JUDGED = [name for name, row in rows().items() if row.experiments]


@cache
def frame_of(experiments: tuple[str, ...]) -> pandas.DataFrame:
    frame = tidy(experiments, local=False)
    return frame.assign(value=frame["value"].astype(float))


@cache
def judged(name: str) -> Claim:
    """The claim on committed records."""
    row = rows()[name]
    if not row.experiments:
        return row.found(Finding(parts=()))
    return row.judged(frame_of(row.experiments))


@cache
def as_it_would_hold(name: str) -> tuple[pandas.DataFrame, Verdict]:
    """The records, or those that would bear out a refuted claim, with the verdict on them."""
    row = rows()[name]
    frame, verdict = frame_of(row.experiments), judged(name).verdict
    if verdict is Verdict.REFUTED:
        assert row.as_claimed is not None
        frame = row.as_claimed(frame)
        verdict = row.judged(frame).verdict
    return frame, verdict


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_has_its_mutations(name: str) -> None:
    row = rows()[name]
    derived = {part.evidence for part in judged(name).parts} == {Evidence.DERIVED}
    if not row.needs and not derived:  # datasheets and formulas alone have no records to change
        assert bool(row.overturn or row.as_claimed) != bool(row.no_records)
    if judged(name).verdict is Verdict.REFUTED:
        assert row.as_claimed is not None
    if row.no_records:
        assert judged(name).verdict is Verdict.NOT_TESTED, f"{name} has records now"
        assert name.split()[0] in (ROOT / row.no_records).read_text()


@pytest.mark.parametrize("name", JUDGED)
def test_records_beyond_the_tolerance_change_the_verdict(name: str) -> None:
    row = rows()[name]
    frame, before = as_it_would_hold(name)
    for change in row.overturn:
        for changed in change.both(frame):
            assert row.judged(changed).verdict is not before, f"{name} is {before} for {change}"


@pytest.mark.parametrize("name", [n for n, row in rows().items() if row.overturn])
def test_a_prediction_off_by_a_third_changes_the_verdict_or_is_said_to_decide_nothing(name: str) -> None:
    """Predictions on record, and formulas that the judge evaluates."""
    row = rows()[name]
    frame, before = as_it_would_hold(name)
    changes = [c for c in row.overturn if isinstance(c, Scale) and c.source == "predicted"]
    with formula_off(-1, 0) as judged_once:
        row.judged(frame)
    if not changes and not judged_once.calls and (frame["source"] == "predicted").any():
        changes = [Scale(source="predicted")]
    seen = [row.judged(one).verdict is not before for change in changes for one in change.both(frame)]
    for place in range(judged_once.calls):
        for direction in (1, -1):
            with formula_off(place, direction):
                seen.append(row.judged(frame).verdict is not before)
    assert (bool(seen) and all(seen)) is row.compared, f"{name}: {seen}"


@pytest.mark.parametrize("name", JUDGED)
def test_every_experiment_that_a_row_names_is_read(name: str) -> None:
    """Without its records, or with others, a row says something else."""
    row = rows()[name]
    frame, _ = as_it_would_hold(name)
    told = row.judged(frame)
    for experiment in () if row.no_records else row.experiments:
        mine = frame["experiment"] == experiment
        if (mine & (frame["source"] != "predicted")).any():
            assert row.judged(frame[~mine].copy()) != told, f"{experiment} is not read"


@pytest.mark.parametrize("name", [name for name, row in rows().items() if row.as_claimed])
def test_records_as_claimed_would_not_refute(name: str) -> None:
    row = rows()[name]
    assert row.as_claimed is not None
    as_claimed = row.judged(row.as_claimed(frame_of(row.experiments))).verdict
    assert as_claimed in (Verdict.REPRODUCED, Verdict.WITHIN_LIMITS, Verdict.CONSISTENT)
    assert judged(name).verdict in (Verdict.REFUTED, as_claimed)


@pytest.mark.parametrize("name", JUDGED)
def test_without_measured_records_nothing_is_reproduced_or_refuted_by_them(name: str) -> None:
    row, claim = rows()[name], judged(name)
    frame = frame_of(row.experiments)
    left = row.judged(frame[frame["source"] != "measured"].copy()).verdict
    allowed = {Verdict.NOT_TESTED, Verdict.CONSISTENT}
    if not any(part.decides.evidence.measured for part in claim.parts):
        allowed.add(claim.verdict)  # what was published or derived is still there
    assert left in allowed
    nothing = row.judged(frame[frame["source"] == "predicted"].copy()).verdict
    assert nothing in {Verdict.NOT_TESTED, Verdict.CONSISTENT}


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_says_what_would_overturn_it(name: str) -> None:
    claim = judged(name)
    assert claim.falsifier
    assert claim.falsifier != "no test yet" or claim.needs
    assert "nan" not in f"{claim.predicted} {claim.measured} {claim.published}".lower()
    for part in claim.parts:
        assert part.verdict is not Verdict.REPRODUCED or part.decides.evidence.measured
    if claim.chosen:
        assert claim.verdict in (Verdict.CONSISTENT, Verdict.REFUTED, Verdict.NOT_TESTED)


@pytest.mark.parametrize("source", ["measured", "published"])
@pytest.mark.parametrize("name", JUDGED)
def test_cells_that_failed_leave_a_verdict(name: str, source: str) -> None:
    row = rows()[name]
    frame = frame_of(row.experiments).copy()
    frame.loc[frame["source"] == source, "value"] = float("nan")
    claim = row.judged(frame)
    assert claim.verdict in Verdict
    assert claim.falsifier
