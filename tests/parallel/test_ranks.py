"""A run shared by ranks: each cell once, a file each, resumed alone, merged without loss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.experiments import Cell, Experiment, experiment, row, run
from repro.gpu.import_results import import_results
from repro.measuring import ranks, records
from repro.measuring.ranks import Rank

ROOT = Path(__file__).resolve().parents[2]
SMALL = "study-note-faults"  # seconds in all


def toy(measure, cells=7) -> Experiment:
    return Experiment(
        name="toy",
        cells=lambda: [Cell(implementation="i", n=n) for n in range(cells)],
        measure=measure,
        device="cpu",
        sources=("repro/measuring/records.py",),
    )


def good(cell, context):
    return [row("n", cell["n"])]


def values(path: Path) -> list[float | None]:
    return [r.value for r in records.read(path)]


def test_without_the_variables_nothing_changes(tmp_path):
    assert ranks.current({}) is None
    assert ranks.current({"WORLD_SIZE": "1", "RANK": "0"}) is None
    run.measure(toy(good), root=tmp_path)
    assert [p.name for p in (tmp_path / "local").iterdir()] == ["toy.jsonl"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "RANK=2 .* WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 but RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK='x' is not a number"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "3"}, "LOCAL_RANK=3 .* RANK=1"),
    ],
)
def test_a_place_that_cannot_be_is_refused(environment, message):
    with pytest.raises(ValueError, match=message):
        ranks.current(environment)


def test_a_rank_sees_its_own_gpu_only():
    for visible, seen in ((None, "1"), ("4,6", "6"), ("GPU-a,GPU-b", "GPU-b")):
        environment = {} if visible is None else {ranks.VISIBLE: visible}
        ranks.take_gpu(Rank(3, 1, 4), environment)
        assert environment[ranks.VISIBLE] == seen
    with pytest.raises(ValueError, match="LOCAL_RANK=1 but CUDA_VISIBLE_DEVICES=4"):
        ranks.take_gpu(Rank(3, 1, 4), {ranks.VISIBLE: "4"})


@pytest.mark.parametrize("size", [2, 3, 9])
def test_the_shares_are_all_cells_once_and_merge_in_place(tmp_path, size):
    for index in range(size):
        run.measure(toy(good), root=tmp_path, rank=Rank(index, 0, size))
    folder = tmp_path / "local"
    shares = [values(folder / f"toy.rank{i}.jsonl") for i in range(size)]
    assert shares == [list(range(7))[i::size] for i in range(size)]
    import_results(tmp_path, tmp_path)
    assert [p.name for p in folder.iterdir()] == ["toy.jsonl"]
    assert sorted(values(folder / "toy.jsonl")) == list(range(7))
    again = [run.measure(toy(good), root=tmp_path, rank=Rank(i, 0, size)) for i in range(size)]
    assert [outcome.measured for outcome in again] == [0] * size, "what was merged is done"


def test_an_interrupted_rank_resumes_its_own_cells(tmp_path):
    def interrupted(cell, context):
        if cell["n"] == 5:
            raise KeyboardInterrupt
        return good(cell, context)

    mine = Rank(1, 0, 2)
    with pytest.raises(KeyboardInterrupt):
        run.measure(toy(interrupted), root=tmp_path, rank=mine)
    path = tmp_path / "local" / "toy.rank1.jsonl"
    assert values(path) == [1, 3]
    outcome = run.measure(toy(good), root=tmp_path, rank=mine)
    assert (outcome.measured, outcome.skipped) == (1, 2)
    assert values(path) == [1, 3, 5]


def test_a_cell_measured_by_two_ranks_is_kept_once_and_a_failure_does_not_win(tmp_path):
    """The number of ranks may change between two runs."""

    def failing(cell, context):
        raise MemoryError("too large")

    root, out = tmp_path / "results", tmp_path / "out"
    run.measure(toy(good), root=out, rank=Rank(0, 0, 2))
    run.measure(toy(failing), root=out, rank=Rank(1, 0, 2))
    run.measure(toy(good), root=out, rank=Rank(2, 0, 3))
    import_results(out, root)
    rows = list(records.read(root / "local" / "toy.jsonl"))
    assert len({r.cell for r in rows}) == len(rows) == 7
    assert sorted(r.value for r in rows if r.error is None) == [0, 2, 4, 5, 6]


def test_processes_share_an_experiment(tmp_path):
    """Each has the variables that torchrun sets."""
    places = [{"RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": "2"} for i in range(2)]
    environment = {**os.environ, "REPRO_RESULTS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "repro", "measure", SMALL]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment | place, stderr=subprocess.PIPE, text=True)
        for place in places
    ]
    for process in processes:
        error = process.communicate(timeout=240)[1]
        assert process.returncode == 0, error
    files = sorted(p.name for p in (tmp_path / "local").glob("*.jsonl"))
    assert files == [f"{SMALL}.rank{i}.jsonl" for i in range(2)]
    import_results(tmp_path, tmp_path)
    rows = list(records.read(tmp_path / "local" / f"{SMALL}.jsonl"))
    assert not [r.error for r in rows if r.error]
    assert {r.cell for r in rows} == {cell.id for cell in experiment(SMALL).cells()}
