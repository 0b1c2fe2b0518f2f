"""Every verdict can fail: records changed beyond the tolerance change it, dropped ones take it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas
import pytest

from figures import common
from repro import claims
from repro.claims import CATALOGUE, Claim, Verdict
from repro.experiments import tidy
from tests.support.claim_mutations import AS_CLAIMED, NO_RECORDS, OVERTURN

ROOT = Path(__file__).resolve().parents[2]
Judge = Callable[[pandas.DataFrame], list[Claim]]


@cache
def frame_of(experiments: tuple[str, ...]) -> pandas.DataFrame:
    frame = tidy(experiments, local=False)
    return frame.assign(value=frame["value"].astype(float))


@cache
def judges() -> dict[str, tuple[tuple[str, ...], Judge, Claim]]:
    """Claim -> the experiments behind it, what judges it, and the claim on committed records."""
    found: dict[str, tuple[tuple[str, ...], Judge, Claim]] = {}
    makers: list[tuple[tuple[str, ...], Judge]] = [
        (common.module(name).EXPERIMENTS, common.module(name).verdicts)
        for name in common.names()
        if hasattr(common.module(name), "verdicts")
    ]
    for source in claims.sources():
        makers.append((source.experiments, lambda frame, s=source: [s.judge(frame)]))
    for experiments, judge in makers:
        for claim in judge(frame_of(experiments)):
            assert claim.name not in found, f"{claim.name} is judged twice"
            found[claim.name] = (experiments, judge, claim)
    return found


def verdict(name: str, frame: pandas.DataFrame) -> Verdict:
    (claim,) = [c for c in judges()[name][1](frame) if c.name == name]
    return claim.verdict


def test_every_claim_of_the_catalogue_is_judged_and_has_its_mutations() -> None:
    assert set(judges()) == set(CATALOGUE)
    assert set(OVERTURN) | set(AS_CLAIMED) | set(NO_RECORDS) == set(CATALOGUE)
    assert not set(NO_RECORDS) & (set(OVERTURN) | set(AS_CLAIMED))
    refuted = {n for n, (_, _, claim) in judges().items() if claim.verdict is Verdict.REFUTED}
    assert refuted <= set(AS_CLAIMED)
    for name, where in NO_RECORDS.items():
        assert judges()[name][2].verdict is Verdict.NOT_TESTED, f"{name} has records now"
        assert not where or name.split()[0] in (ROOT / where).read_text()


@pytest.mark.parametrize("name", list(OVERTURN))
def test_records_beyond_the_tolerance_change_the_verdict(name: str) -> None:
    experiments, _, claim = judges()[name]
    frame, before = frame_of(experiments), claim.verdict
    if before is Verdict.REFUTED:  # then as the records would have to be for the claim to be right
        frame = AS_CLAIMED[name](frame)
        before = verdict(name, frame)
    for change in OVERTURN[name]:
        seen = [verdict(name, changed) for changed in change.both(frame)]
        assert any(v is not before for v in seen), f"{name} is {before} for {change}"


@pytest.mark.parametrize("name", list(AS_CLAIMED))
def test_records_as_claimed_would_not_refute(name: str) -> None:
    experiments, _, claim = judges()[name]
    as_claimed = verdict(name, AS_CLAIMED[name](frame_of(experiments)))
    assert as_claimed in (Verdict.REPRODUCED, Verdict.WITHIN_LIMITS, Verdict.CONSISTENT)
    assert claim.verdict in (Verdict.REFUTED, as_claimed)


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_without_measured_records_nothing_is_reproduced_or_refuted_by_them(name: str) -> None:
    experiments, _, claim = judges()[name]
    frame = frame_of(experiments)
    left = verdict(name, frame[frame["source"] != "measured"].copy())
    allowed = {Verdict.NOT_TESTED, Verdict.CONSISTENT}
    if not any(part.decides.evidence.measured for part in claim.parts):
        allowed.add(claim.verdict)  # what was published or derived is still there
    assert left in allowed
    nothing = verdict(name, frame[frame["source"] == "predicted"].copy())
    assert nothing in {Verdict.NOT_TESTED, Verdict.CONSISTENT}


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_every_claim_says_what_would_overturn_it(name: str) -> None:
    claim = judges()[name][2]
    assert claim.falsifier
    assert claim.falsifier != "no test yet"
    assert "nan" not in f"{claim.predicted} {claim.measured} {claim.published}".lower()
    for part in claim.parts:
        assert part.verdict is not Verdict.REPRODUCED or part.decides.evidence.measured
    if claim.chosen:
        assert claim.verdict in (Verdict.CONSISTENT, Verdict.REFUTED, Verdict.NOT_TESTED)
