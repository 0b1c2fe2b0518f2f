"""``python -m repro judge``: what decides a claim, where it was measured, what a rerun takes."""

from __future__ import annotations

import json

import pytest

from repro import claims
from repro.commands import judge
from tests.support.command_support import run


def test_a_row_is_told_with_its_parts_and_its_records(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "judge", "K13")
    assert status == 0
    assert "K13: unfused scale-and-bias moves twice the fused bytes" in out
    assert "REPRODUCED (executed and counted on the host)" in out
    assert "- bytes unfused over fused, counted, over 2: 1, reproduced" in out
    assert "agrees in 1 to 1" in out
    assert "rule: count: an integer" in out
    assert "numbers on" in out
    assert "commit" in out
    status, out, _ = run(capsys, "judge", "K13", "--json")
    told = json.loads(out)
    assert (told["verdict"], told["name"]) == ("reproduced", "K13")
    assert told["parts"][0]["value"] == "1"


def test_what_nobody_can_measure_here_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "judge", "FA-1 Fig. 1 right")
    assert status == 0
    assert "fig1-right: needs an NVIDIA GPU, none found" in out
    status, out, _ = run(capsys, "judge", "FA-1 Proposition 3")
    assert "NOT TESTED (none)" in out
    assert "a test would take: a proof" in out
    status, _, err = run(capsys, "judge", "FA-1 Fig. 1 right", "--again")
    assert status == 1
    assert "cannot be measured on this machine" in err


def test_a_name_that_is_near_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "judge", "Theorem 2")
    assert status == 1
    assert "no claim 'Theorem 2'; near it:" in err
    assert "FA-1 Theorem 2" in err


def test_what_can_be_measured_here_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro import measure

    asked: list[list[str]] = []
    monkeypatch.setattr(measure, "measure", lambda names, **_: asked.append(list(names)))
    judge.measure(claims.rows()["K8"])
    assert asked == [["checkpoint-pareto", "checkpoint-depth"]]
