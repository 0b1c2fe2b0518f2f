"""Records survive kills, full disks, two writers and damage; other versions are told apart."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from repro.experiments import Cell, Experiment, UnavailableError, record, run
from repro.measuring import records
from repro.measuring.records import Record

ROOT = Path(__file__).resolve().parents[2]


def rows(cell: str, count: int = 3) -> list[Record]:
    base = {"experiment": "x", "implementation": "flash", "metric": "n", "source": "measured"}
    return [Record.from_json({**base, "value": i, "unit": "1", "cell": cell, "note": "é" * 20}) for i in range(count)]


def cells_on_record(path: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for r in records.read(path):
        assert r.cell is not None
        counts[r.cell] = counts.get(r.cell, 0) + 1
    return counts


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


WRITER = """
import sys
from pathlib import Path
from repro.measuring.records import Record, append
path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
base = {"experiment": "x", "implementation": "y", "metric": "n", "source": "measured", "unit": "1"}
print("ready", flush=True)
for i in range(count):
    append(path, [Record.from_json({**base, "value": j, "cell": f"{name}{i}", "note": "z" * 3000})
                  for j in range(5)])
"""


def test_a_kill_at_any_point_loses_at_most_the_cell_in_progress(tmp_path: Path) -> None:
    path, chance = tmp_path / "x.jsonl", random.Random(1)
    for attempt in range(3):
        before = set(cells_on_record(path))
        process = subprocess.Popen(python(WRITER, path, f"run{attempt}-", 100_000), cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0.01, 0.15))
        process.kill()
        process.wait()
        process.stdout.close()
        after = cells_on_record(path)
        assert set(after.values()) <= {5}, "a cell with some of its rows"
        assert before <= set(after)
        written = sorted(int(c.split("-")[1]) for c in after if c.startswith(f"run{attempt}-"))
        assert written == list(range(len(written)))
    assert len(cells_on_record(path)) > 3


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_cell_that_only_its_last_newline_is_missing_of_stays(name: str, tmp_path: Path) -> None:
    """Whoever reads takes it for measured, so whoever appends must not cut it off."""
    path = tmp_path / "x.jsonl"
    for cell in sorted({"a", name}):
        records.append(path, rows(cell))
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    before = cells_on_record(path)
    assert before == dict.fromkeys(sorted({"a", name}), 3)
    records.append(path, rows("c"))
    assert cells_on_record(path) == {**before, "c": 3}


def test_a_full_disk_is_an_error_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    records.append(path, rows("a"))
    content = path.read_bytes()
    code = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(content) + 5000},) * 2)\n" + WRITER
    )
    done = subprocess.run(python(code, path, "b", 1), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "OSError" in done.stderr
    assert f"'{path}'" in done.stderr  # which file
    assert path.read_bytes() == content


def test_a_full_disk_is_an_error_that_names_the_file_also_of_a_new_version(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    records.append(path, rows("a"))
    content = path.read_bytes()
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\nfrom repro.measuring import records\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100,) * 2)\n"
        "path = Path(sys.argv[1])\n"
        "records.replace(path, {'none'}, records.read(path))"
    )
    done = subprocess.run(python(code, path), cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"'{path}'" in done.stderr.splitlines()[-1]
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed_by_the_next_run(tmp_path: Path) -> None:
    """Killed between writing a new version and putting it in its place; and holding the lock."""
    path, other = tmp_path / "x.jsonl", tmp_path / ".y.jsonl.draft"
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom repro.measuring import records\n"
        "os.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        "path = Path(sys.argv[1])\n"
        "with records.exclusive(path):\n"
        "    records.replace(path, {'none'}, records.read(path))"
    )
    records.append(path, rows("a"))
    content = path.read_bytes()
    other.touch()
    assert subprocess.run(python(code, path), cwd=ROOT, check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 4  # the draft and the lock beside the records
    with records.exclusive(path):
        pass
    assert sorted(tmp_path.iterdir()) == [other, path]
    assert path.read_bytes() == content


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    records.append(path, rows("a"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    records.append(path, rows("b"))
    assert cells_on_record(path) == {"a": 3, "b": 3}


def test_two_writers_at_once_do_not_mix_their_cells(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    writers = [
        subprocess.Popen(python(WRITER, path, name, 60), cwd=ROOT, stdout=subprocess.DEVNULL)
        for name in ("left", "right")
    ]
    for _ in range(20):  # a third process replaces a cell meanwhile
        records.replace(path, {"mine"}, rows("mine"))
    assert [w.wait() for w in writers] == [0, 0]
    order = [r.cell for r in records.read(path)]
    starts = [i for i, cell in enumerate(order) if i == 0 or cell != order[i - 1]]
    assert len(starts) == len(set(order)) == 121, "the rows of a cell lie apart"
    counts = cells_on_record(path)
    assert counts.pop("mine") == 3
    assert set(counts.values()) == {5}


RUNNER = """
import sys, time
from pathlib import Path
from repro.experiments import Cell, Experiment, row, run
root = Path(sys.argv[1])
def measure(cell, context):
    with open(root / "seen", "a") as seen:
        seen.write(f"{cell['seqlen_q']}\\n")
    time.sleep(0.15)
    return [row("n", 1)]
outcome = run.measure(Experiment(
    name="toy", device="cpu", sources=("repro/measuring/records.py",),
    cells=lambda: [Cell(implementation="flash", seqlen_q=n) for n in range(5)], measure=measure,
), root=root)
print(outcome.measured, outcome.skipped)
"""


def test_a_second_run_waits_for_the_first_and_measures_nothing_twice(tmp_path: Path) -> None:
    runs = [
        subprocess.Popen(python(RUNNER, tmp_path), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    ends = [r.communicate() for r in runs]
    assert [r.returncode for r in runs] == [0, 0], ends
    assert sorted(out.split() for out, _ in ends) == [["0", "5"], ["5", "0"]]
    assert "another run is measuring it" in "".join(err for _, err in ends)
    assert sorted((tmp_path / "seen").read_text().split()) == list("01234")
    assert [p.name for p in (tmp_path / "local").iterdir()] == ["toy.jsonl"], "no lock is left"


def test_what_no_cell_can_be_measured_without_is_one_line_and_no_file(tmp_path: Path) -> None:
    def measure(cell, context):
        raise UnavailableError("no permission to read GPU counters")

    toy = Experiment(
        name="toy",
        cells=lambda: [Cell(implementation="x")],
        measure=measure,
        device="cpu",
        sources=("repro/measuring/records.py",),
    )
    outcome = run.measure(toy, root=tmp_path)
    assert outcome.reason == "no permission to read GPU counters"
    assert (outcome.measured, outcome.failed) == (0, 0)
    assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 2000 + "1" + "}" * 2000])
def test_a_line_nested_without_end_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{text}\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1: (not JSON|row lacks)"):
        list(records.read(path))


def test_a_damaged_line_is_noticed_and_a_deliberate_change_is_possible(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    records.append(path, rows("a", 1))
    records.append(path, rows("b", 1))
    text = path.read_text()
    path.write_text(text.replace('"value":0', '"value":7', 1))
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1: the checksum does not match"):
        list(records.read(path))
    without = json.loads(path.read_text().splitlines()[0])
    del without["crc"]
    path.write_text(json.dumps(without) + "\n" + text.splitlines(keepends=True)[1])
    assert [r.value for r in records.read(path)] == [7, 0]


def test_every_line_carries_version_and_checksum_and_rows_do_not(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    records.append(path, rows("a"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["schema"] == records.SCHEMA and len(line["crc"]) == 8 for line in lines)
    assert not any(set(r.to_json()) & set(records.ENVELOPE) for r in records.read(path))
    with pytest.raises(ValueError, match="crc"):
        record({}, experiment="x", implementation="y", metric="n", source="measured", value=1, unit="1", crc="0")


@pytest.mark.parametrize(
    ("schema", "message"), [(records.SCHEMA + 1, "newer than this program's"), (0, "got 0"), ("2", "got '2'")]
)
def test_a_row_of_an_unknown_version_is_refused_with_a_line(tmp_path, schema, message):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(rows("a")[0].to_json() | {"schema": schema}) + "\n")
    with pytest.raises(ValueError, match=rf"x\.jsonl, line 1: .*{message}"):
        list(records.read(path))


def test_rows_of_the_first_version_are_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    old = rows("a")[0].to_json() | {"gpus": 8}
    path.write_text(json.dumps(old) + "\n")
    (back,) = records.read(path)
    assert back.to_json() == old
    records.append(path, [back])
    first, second = path.read_text().splitlines()
    assert "schema" not in json.loads(first)
    assert json.loads(second)["gpus"] == 8
    assert [r.extra for r in records.read(path)] == [{"gpus": 8}] * 2
    assert set(records.MIGRATIONS) == set(range(1, records.SCHEMA)), "a version without a way up"
