"""The prepared GPU run, with fake stages: order, shares, skipping, endings, what comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from repro.experiments.gpu import gpu_throughput
from repro.gpu import judgement
from repro.gpu.plan import Stage, stages
from repro.gpu.run import ARCHIVE, SUMMARY, main, run
from repro.instruments.hopper_guard import Findings
from repro.measuring import records
from repro.measuring.records import Record
from tests.support.bare_image import LACKING
from tests.support.command_support import ROOT
from tests.support.process_support import reports_its_id, wait_until_gone


def stage(name: str, code: str, share: float = 1.0, least_s: float = 0.0) -> Stage:
    return Stage(name, [sys.executable, "-c", code], "a test", share, 1.0, least_s)


def inside(out: Path) -> dict[str, str]:
    """What the archive holds, by its name there."""
    with tarfile.open(out / ARCHIVE) as tar:
        files = {m.name: tar.extractfile(m) for m in tar}
        return {name.removeprefix("gpu-run/"): f.read().decode() for name, f in files.items() if f}


def test_stages_run_in_order_and_each_ending_is_told(tmp_path: Path) -> None:
    plan = [
        stage("good", "print('said one')"),
        stage("bad", "import sys; print('said two'); sys.exit(3)"),
        Stage("absent", [str(tmp_path / "nothing-here")], "a test", least_s=0),
    ]
    endings = run(plan, tmp_path / "out", 60)
    assert [(e.stage.name, e.outcome.split(" (")[0]) for e in endings] == [
        ("good", "ok"),
        ("bad", "failed"),
        ("absent", "failed"),
    ]
    assert endings[1].outcome == "failed (exit 3: said two)"
    files = inside(tmp_path / "out")
    assert files["logs/00-good.txt"].strip() == "said one"
    summary = (tmp_path / "out" / SUMMARY).read_text()
    assert files["summary.txt"] == summary
    assert [line.split()[0] for line in summary.splitlines() if "predicted" in line] == ["good", "bad", "absent"]


def test_at_most_eight_files_come_back(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from repro.measuring import records\n"
        "from repro.measuring.records import Record\n"
        "for i in range(20):\n"
        "    records.append(Path(os.environ['REPRO_RESULTS']) / 'card' / f'e{i}.jsonl', [Record(\n"
        "        experiment=f'e{i}', implementation='i', metric='m', source='measured', value=1,\n"
        "        unit='ms', cell='c')])"
    )
    run([stage("many", code)], tmp_path / "out", 120)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [ARCHIVE, SUMMARY]
    files = inside(tmp_path / "out")
    assert sum(name.startswith("records/card/") for name in files) == 20
    assert {"environment.txt", "plan.txt", "summary.txt"} <= set(files)


def test_a_hung_stage_is_stopped_with_all_it_started_and_the_next_one_runs(tmp_path: Path) -> None:
    """Its children may lead process groups of their own, as those of the guard and of ncu do."""
    ready = tmp_path / "child"
    child = reports_its_id(ready)
    hung = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], process_group=0)\n"
        "time.sleep(600)\n"
    )
    plan = [stage("hung", hung, share=0.1), stage("next", "pass")]
    endings = run(plan, tmp_path / "out", 50)
    assert endings[0].outcome == "out of time (stopped after 5 s)"
    assert endings[1].outcome == "ok"
    if ready.exists():  # else it was stopped before it could say who it is
        wait_until_gone(int(ready.read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_process_and_keeps_what_it_has(tmp_path: Path, number: int) -> None:
    ready = tmp_path / "ready"
    slow = reports_its_id(ready)
    code = (
        "import sys, time; from pathlib import Path; from repro.gpu.plan import Stage\n"
        "from repro.gpu.run import run\n"
        f"slow = {slow!r}\n"
        "plan = [Stage('first', [sys.executable, '-c', 'print(1)'], '', least_s=0),\n"
        "        Stage('slow', [sys.executable, '-c', slow], '', share=1, least_s=0)]\n"
        f"run(plan, Path({str(tmp_path / 'out')!r}), 60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(120)
    wait_until_gone(int(ready.read_text()))
    assert inside(tmp_path / "out")["logs/00-first.txt"] == "1\n"
    assert "first" in (tmp_path / "out" / SUMMARY).read_text()


def test_a_run_goes_on_from_the_archive(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from repro.measuring import records\n"
        "from repro.measuring.records import Record\n"
        "path = Path(os.environ['REPRO_RESULTS']) / 'card' / 'e.jsonl'\n"
        "print('before:', len(list(records.read(path))))\n"
        "records.append(path, [Record(experiment='e', implementation='i', metric='m',\n"
        "    source='measured', value=1, unit='ms', cell='c')])"
    )
    for before in (0, 1):
        run([stage("one", code)], tmp_path, 60)
        assert inside(tmp_path)["logs/00-one.txt"].strip() == f"before: {before}"


def test_a_stage_gets_a_share_of_what_is_left(tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 20.0
        return now

    told = "import os, time; print(float(os.environ['REPRO_STAGE_ENDS']) - time.monotonic())"
    plan = [
        stage("first", told, share=0.5, least_s=10.0),
        stage("second", told, share=0.1, least_s=10.0),
        stage("third", "pass", least_s=50.0),
    ]
    endings = run(plan, tmp_path, 150, clock=clock)
    assert endings[2].outcome == "skipped (10 s left)"
    files = inside(tmp_path)
    assert 60 < float(files["logs/00-first.txt"]) <= 65  # half of 150 - 20
    assert 4 < float(files["logs/01-second.txt"]) <= 7  # a tenth of 150 - 80


def test_a_budget_must_be_positive(tmp_path: Path) -> None:
    for budget in (0, float("nan")):
        with pytest.raises(ValueError, match="must be positive, got"):
            run([], tmp_path, budget)


def test_the_plan_is_printed_on_any_machine(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dry", "--budget-s", "480", "--cores", "16"])
    lines = capsys.readouterr().out.splitlines()
    told = {line.split()[0]: line.split() for line in lines[1:]}
    assert set(told) >= {s.name for s in stages()}
    for s in stages(cores=16):
        assert float(told[s.name][1]) == pytest.approx(s.predicted_s, abs=0.51)
        assert s.predicted_s > 0
    # What decides is expected to fit, whole; how busy units are comes a batch at a time.
    decisive = ["guard", "gpu-throughput", "gpu-traffic", *(n for n in told if "-l2-" in n)]
    for name in decisive:
        assert "cut short" not in " ".join(told[name])
        assert "skipped" not in " ".join(told[name])
    assert "skipped" not in " ".join(told["gpu-sm-units"])


def rows_of(**tflops: float) -> list[Record]:
    """Every shape of gpu-throughput with these numbers."""
    made = []
    for cell in gpu_throughput.cells():
        for name, value in tflops.items():
            made.append(
                records.record(
                    cell,
                    experiment=gpu_throughput.EXPERIMENT.name,
                    implementation=name.replace("_", "-"),
                    source="measured",
                    metric="throughput_tflops",
                    value=value,
                    unit="TFLOP/s",
                    device="NVIDIA H200",
                    cell=cell.id,
                )
            )
    return made


def test_a_form_below_the_step_below_is_left_out_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage's records say so; the file that dispatch reads has it, and so has the summary.

    No second of a rented card goes into predictions.
    """
    for name in ("gpu_throughput", "gpu_traffic"):
        monkeypatch.setattr(f"repro.experiments.gpu.{name}.predict", None)
    rows = [
        r
        for r in rows_of(flash=300.0, flash_sm90=600.0, sdpa_cudnn=580.0)
        if not (r.implementation == "flash-sm90" and r.pass_ == "backward" and r.head_dim == 64)
    ]
    slow = [r for r in rows_of(flash_sm90=240.0) if r.pass_ == "backward" and r.head_dim == 64]
    wrong = records.record(
        gpu_throughput.cells()[0],
        experiment=gpu_throughput.EXPERIMENT.name,
        source="measured",
        implementation="flash-sm90-optimistic",
        metric="time_ms",
        error="wrong: out is off by 3",
    )
    kept = tmp_path / "rows.jsonl"
    records.append(kept, [*rows, *slow, wrong])
    copy = (
        "import os, shutil; to = os.environ['REPRO_RESULTS'] + '/nvidia-h200/'\n"
        f"os.makedirs(to); shutil.copy({str(kept)!r}, to + 'gpu-throughput.jsonl')"
    )
    show = "import os; print(open(os.environ['REPRO_HOPPER_CHECKED']).read())"
    run([stage("gpu-throughput", copy), stage("later", show)], tmp_path / "out", 60)
    refused = json.loads(inside(tmp_path / "out")["logs/01-later.txt"])["refused"]
    assert refused == {
        "flash-sm90 d64 128x128": "0.80 x the speed of the sm_80 kernels, mean over 12 shapes",
        "flash-sm90-optimistic": "wrong: out is off by 3",
    }
    summary = (tmp_path / "out" / SUMMARY).read_text()
    assert "left out of dispatch: 2 Hopper implementations" in summary
    assert "exact forward: 1.034 x the best competing implementation" in summary
    assert Findings(**json.loads(inside(tmp_path / "out")["hopper.json"])).refused == refused


def test_a_bare_image_is_enough() -> None:
    """No typer, pydantic, rich, pandas, SciPy …: the plan and the stages' programs start."""
    programs = [s.command[2] for s in stages() if s.command[1] == "-m" and s.command[2] != "pytest"]
    code = (
        "import tests.support.bare_image, importlib\n"
        f"for name in {sorted(set(programs))}: importlib.import_module(name)\n"
        "from repro.gpu import run; run.main(['--dry'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "WITHOUT": ",".join(LACKING)},
    )
    assert done.returncode == 0, done.stderr
    assert "gpu-throughput" in done.stdout


def test_a_fault_in_judging_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("no such column")

    monkeypatch.setattr(judgement, "judge", broken)
    monkeypatch.setattr(judgement, "shapes", broken)
    endings = run([stage("gpu-throughput", "pass"), stage("next", "pass")], tmp_path, 60)
    assert [e.outcome for e in endings] == ["ok", "ok"]
    assert "not judged: KeyError" in (tmp_path / SUMMARY).read_text()
