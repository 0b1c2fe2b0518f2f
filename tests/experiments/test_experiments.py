"""Running experiments: resuming, failures as rows, staleness, and the command line."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from repro import experiments
from repro.experiments import Cell, Experiment, row, run
from repro.measuring import machine, progress, quiet, records
from tests.support.command_support import run as command_line

ROOT = Path(__file__).resolve().parents[2]


def cells():
    return [Cell(implementation="flash", pass_="forward", seqlen_q=n) for n in (1, 2, 3)]


def experiment(measure, **values):
    return Experiment(
        name="toy", cells=cells, measure=measure, device="cpu", sources=("repro/measuring/records.py",), **values
    )


def good(cell, context):
    return [row("n", cell["seqlen_q"])]


def stored(root):
    return list(records.read(root / "local" / "toy.jsonl"))


def test_every_cell_becomes_a_row_with_its_machine(tmp_path):
    outcome = run.measure(experiment(good), root=tmp_path)
    assert (outcome.measured, outcome.skipped, outcome.failed) == (3, 0, 0)
    rows = stored(tmp_path)
    assert [r.value for r in rows] == [1, 2, 3]
    assert all(r.device == machine.cpu() and r.date and r.sources for r in rows)
    assert len({r.cell for r in rows}) == 3


def test_an_interrupted_run_goes_on_and_loses_only_its_cell(tmp_path):
    def interrupted(cell, context):
        if cell["seqlen_q"] == 3:
            raise KeyboardInterrupt
        return good(cell, context)

    with pytest.raises(KeyboardInterrupt):
        run.measure(experiment(interrupted), root=tmp_path)
    assert [r.value for r in stored(tmp_path)] == [1, 2]
    seen = []

    def counting(cell, context):
        seen.append(cell["seqlen_q"])
        return good(cell, context)

    outcome = run.measure(experiment(counting), root=tmp_path)
    assert seen == [3]
    assert (outcome.measured, outcome.skipped) == (1, 2)
    assert [r.value for r in stored(tmp_path)] == [1, 2, 3]


def test_a_failed_cell_is_a_row_and_is_tried_again(tmp_path):
    def failing(cell, context):
        if cell["seqlen_q"] == 2:
            raise MemoryError("out of memory: 3 GiB\nsecond line")
        return good(cell, context)

    outcome = run.measure(experiment(failing), root=tmp_path)
    assert (outcome.measured, outcome.failed) == (2, 1)
    (bad,) = [r for r in stored(tmp_path) if r.error]
    assert bad.error == "MemoryError: out of memory: 3 GiB"
    assert bad.seqlen_q == 2
    assert run.measure(experiment(good), root=tmp_path).measured == 1
    rows = stored(tmp_path)
    assert sorted(r.value for r in rows) == [1, 2, 3]
    assert not any(r.error for r in rows)


def test_cells_measured_from_other_code_are_measured_again(tmp_path):
    run.measure(experiment(good), root=tmp_path)
    path = tmp_path / "local" / "toy.jsonl"
    old = [records.Record.from_json(r.to_json() | {"sources": "older"}) for r in stored(tmp_path)]
    records.write(path, old)
    assert run.measure(experiment(good), root=tmp_path).measured == 3
    assert len(stored(tmp_path)) == 3
    assert run.measure(experiment(good), root=tmp_path).measured == 0
    assert run.measure(experiment(good), root=tmp_path, again=True).measured == 3
    assert len(stored(tmp_path)) == 3


def test_measuring_again_forgets_cells_that_are_no_longer_listed(tmp_path):
    run.measure(experiment(good), root=tmp_path)
    fewer = replace(experiment(good), cells=lambda: cells()[:2])
    run.measure(fewer, root=tmp_path)
    assert [r.value for r in stored(tmp_path)] == [1, 2, 3]  # going on removes nothing
    run.measure(fewer, root=tmp_path, again=True)
    assert [r.value for r in stored(tmp_path)] == [1, 2]


HOST_RECORDS = sorted((ROOT / "results/host").glob("*.jsonl"))


@pytest.mark.parametrize("path", HOST_RECORDS, ids=lambda path: path.stem)
def test_committed_records_are_of_cells_that_are_listed(path):
    """A figure would draw others beside them as if they belonged together."""
    listed = {cell.id for cell in experiments.experiment(path.stem).cells()}
    assert {r.cell for r in records.read(path)} == listed


def test_quick_leaves_what_is_long_and_on_record(tmp_path):
    long = experiment(good, on_demand=True)
    assert run.measure(long, root=tmp_path, quick=True).measured == 3, "nothing is on record yet"
    shutil.rmtree(tmp_path / "local")
    run.measure(long, root=tmp_path, into="host")
    assert "make measure EXPERIMENT=toy" in run.measure(long, root=tmp_path, quick=True).reason
    assert run.measure(experiment(good), root=tmp_path, quick=True).measured == 3
    shutil.rmtree(tmp_path / "local")
    assert run.measure(long, root=tmp_path).measured == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "returned no rows"),
        ([row("n", 1, experiment="other")], "not a measured row of toy"),
        ([row("n", 1, source="predicted")], "not a measured row of toy"),
    ],
)
def test_a_measurement_that_gives_the_wrong_rows_fails_its_cell(tmp_path, rows, message):
    assert run.measure(experiment(lambda cell, context: rows), root=tmp_path).failed == 3
    assert all(message in r.error for r in stored(tmp_path))


def test_a_cell_listed_twice_is_an_error_before_any_work(tmp_path):
    twice = Experiment(
        name="toy",
        cells=lambda: cells() + cells()[:1],
        measure=good,
        device="cpu",
        sources=("repro/measuring/records.py",),
    )
    with pytest.raises(ValueError, match=r"twice.*seqlen_q=1"):
        run.measure(twice, root=tmp_path)
    assert not (tmp_path / "local").exists()


def test_a_cell_is_the_same_whatever_the_order_of_its_fields():
    one = Cell(implementation="flash", pass_="forward")
    other = Cell(pass_="forward", implementation="flash")
    assert one.id == other.id
    assert one.id != Cell(implementation="flash", pass_="backward").id
    assert str(one) == "implementation=flash pass=forward"


def test_device_and_measure_must_agree():
    with pytest.raises(ValueError, match="tpu"):
        Experiment(name="x", cells=cells, measure=good, device="tpu")
    with pytest.raises(ValueError, match="measure is absent"):
        Experiment(name="x", cells=cells, device="cpu")


def test_gpu_experiments_say_why_they_do_not_run(monkeypatch):
    monkeypatch.setattr(machine, "gpu", lambda: None)
    assert "GPU" in run.device_reason("cuda")
    assert run.device_reason("host") is None
    monkeypatch.setattr(machine, "gpu", lambda: machine.Gpu("NVIDIA H200 NVL", "580", 1))
    assert run.folder("cuda") == "nvidia-h200-nvl"
    assert run.folder("cuda", "elsewhere") == "elsewhere"


def test_the_digest_follows_the_code_and_only_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "a.cu"
    source.write_text("one")
    first = machine.digest(["kernels"])
    (tmp_path / "kernels" / "README.md").write_text("words")
    assert machine.digest(["kernels"]) == first
    source.write_text("two")
    assert machine.digest(["kernels"]) != first
    with pytest.raises(ValueError, match="nowhere"):
        machine.digest(["nowhere"])


@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_lists_cells_and_valid_predictions(name):
    one = experiments.experiment(name)
    listed = list(one.cells())
    assert len({cell.id for cell in listed}) == len(listed)
    assert one.device == "none" or listed
    json.dumps([dict(cell) for cell in listed])
    _, rows = experiments._predicted(one)  # kept for the tests of figures and claims
    assert all(r.source == "predicted" and r.experiment == name for r in rows)
    machine.digest(one.sources)


def test_listing_figures_and_experiments_needs_neither_torch_nor_cupy():
    code = (
        "import sys, repro.experiments as e, figures.common as c\n"
        "[e.experiment(n) for n in e.names()]; [c.module(n) for n in c.names()]\n"
        "print(sorted({'torch', 'cupy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("measure", "nonsense"), "no experiment 'nonsense'; known: "), (("nonsense",), "No such command 'nonsense'")],
)
def test_a_wrong_command_is_one_line_of_error_and_a_failure(capsys, arguments, words):
    status, out, err = command_line(capsys, *arguments)
    assert status != 0
    first, *rest = err.splitlines()
    assert first.startswith("error: ")
    assert words in first
    assert all(line.startswith("try: ") for line in rest)
    assert out == ""


def test_doctor_names_a_missing_compiler(monkeypatch):
    from repro import doctor

    monkeypatch.setenv("CXX", "no-such-compiler")
    found = doctor.compiler()
    assert not found.ok
    assert "no-such-compiler" in found.detail
    text, complete = doctor.report()
    assert not complete
    assert "MISSING" in text


@pytest.mark.parametrize(
    ("held", "other", "waits"),
    [("alone", "alone", True), ("beside_others", "alone", True), ("beside_others", "beside_others", False)],
)
def test_measurements_run_alone_and_drawings_beside_each_other(tmp_path, monkeypatch, held, other, waits):
    lock = tmp_path / "lock"
    monkeypatch.setattr(quiet, "lock_file", lambda: lock)
    code = (
        "import sys; from pathlib import Path; from repro.measuring import quiet\n"
        "quiet.lock_file = lambda: Path(sys.argv[1]); print('ready', flush=True)\n"
        f"with quiet.{other}(): print('in')\n"
    )
    with getattr(quiet, held)():
        process = subprocess.Popen([sys.executable, "-c", code, str(lock)], cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        if waits:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        else:
            assert process.wait(60) == 0
    assert process.wait(60) == 0
    process.stdout.close()


def test_what_records_seconds_is_measured_alone_and_what_counts_is_not() -> None:
    for name in experiments.names():
        one = experiments.experiment(name)
        rows = [r for r in records.recorded("host", name) if r.source == "measured"]
        if one.device == "cpu" and rows:
            clocks = any(r.unit in ("s", "B/s") for r in rows)
            assert one.needs_quiet is clocks, name
        else:
            assert one.needs_quiet is (one.device == "cuda"), name


def test_progress_says_how_long_the_same_work_took_last_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(progress.time, "monotonic", iter(range(0, 1000, 7)).__next__)
    assert list(progress.track(["a", "b"], "work")) == ["a", "b"]
    assert "work: 2 to do" in capsys.readouterr().err
    before = progress.last_time("work", 2)
    assert before is not None
    assert before > 0
    assert list(progress.track(["a", "b"], "work")) == ["a", "b"]
    assert f"work ({before:.0f} s last time): 2 to do" in capsys.readouterr().err
    assert progress.last_time("work", 3) is None  # part of it, or more of it, is other work
