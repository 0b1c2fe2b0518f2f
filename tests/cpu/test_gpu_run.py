"""The prepared GPU run, with fake stages: order, limits, skipping, logs and endings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from repro.gpu_run import Stage, run, stages


def stage(name: str, code: str, limit_s: float = 30.0, least_s: float = 0.0) -> Stage:
    return Stage(name, [sys.executable, "-c", code], limit_s, "a test", least_s)


def test_stages_run_in_order_and_each_ending_is_told(tmp_path: Path) -> None:
    plan = [
        stage("good", "print('said one')"),
        stage("bad", "import sys; print('said two'); sys.exit(3)"),
        Stage("absent", [str(tmp_path / "nothing-here")], 5, "a test", 0),
    ]
    endings = run(plan, tmp_path / "out", 60)
    assert [(e.stage, e.outcome.split(" (")[0]) for e in endings] == [
        ("good", "ok"),
        ("bad", "failed"),
        ("absent", "failed"),
    ]
    assert "exit 3" in endings[1].outcome
    log = (tmp_path / "out" / "log.txt").read_text()
    assert log.index("=== good") < log.index("said one") < log.index("said two")
    summary = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert [line.split()[0] for line in summary] == ["good", "bad", "absent"]


def test_a_hung_stage_is_stopped_with_its_children_and_the_next_one_runs(tmp_path: Path) -> None:
    marker = tmp_path / "child-survived"
    child = f"import time; time.sleep(8); open({str(marker)!r}, 'w')"
    hung = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "time.sleep(600)\n"
    )
    plan = [stage("hung", hung, limit_s=1.0), stage("next", "pass")]
    endings = run(plan, tmp_path / "out", 60)
    assert endings[0].outcome == "out of time (stopped after 1 s)"
    assert endings[1].outcome == "ok"
    assert endings[0].seconds < 20
    assert not marker.exists()


def test_a_stage_that_cannot_fit_is_skipped_and_says_so(tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 20.0
        return now

    plan = [stage("first", "pass", least_s=10.0), stage("second", "pass", least_s=50.0)]
    endings = run(plan, tmp_path / "out", 90, clock=clock)
    assert endings[0].outcome == "ok"
    assert endings[1].outcome == "skipped (10 s left)"


def test_records_go_below_out(tmp_path: Path) -> None:
    show = "import os; print('to', os.environ['REPRO_RESULTS'])"
    run([stage("show", show)], tmp_path, 30)
    assert f"to {tmp_path / 'records'}" in (tmp_path / "log.txt").read_text()


def test_a_budget_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be positive, got 0"):
        run([], tmp_path, 0)


def test_the_real_stages_fit_the_budget_with_the_most_valuable_first() -> None:
    plan = stages()
    names = [s.name for s in plan]
    assert names[:4] == ["compile", "hopper", "smoke", "gpu-throughput"]
    assert len(set(names)) == len(names)
    assert all(s.limit_s > s.least_s for s in plan)
