"""Records of a run elsewhere find their place, and nothing good is lost on the way."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from analysis.hardware import H200
from repro import archive
from repro.experiments import run
from repro.experiments.gpu import gpu_throughput
from repro.gpu.import_results import import_results, main, report
from repro.gpu.run import ARCHIVE
from repro.measuring import records
from repro.measuring.records import Record


def row(cell: str | None, value: float | None = None, error: str | None = None) -> Record:
    unit = None if value is None else "ms"
    return Record(
        experiment="e",
        implementation="i",
        metric="time_ms",
        source="measured",
        value=value,
        unit=unit,
        error=error,
        cell=cell,
    )


def values(path: Path) -> dict[str | None, float | str | None]:
    return {r.cell: r.value if r.error is None else r.error for r in records.read(path)}


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path, Path]:
    """What the run left, results/, and the recorded file of one experiment."""
    root = tmp_path / "results"
    return tmp_path / "out", root, root / "card" / "e.jsonl"


def test_new_cells_are_added_and_measured_ones_replaced(places: tuple[Path, Path, Path]) -> None:
    out, root, recorded = places
    records.append(recorded, [row("a", 1.0), row("b", 2.0)])
    records.append(out / "records" / "card" / "e.jsonl", [row("b", 3.0), row("c", 4.0)])
    (done,) = import_results(out, root)
    assert values(recorded) == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert (done.taken, done.kept) == (2, 0)


def test_a_failure_does_not_displace_a_measurement(places: tuple[Path, Path, Path]) -> None:
    out, root, recorded = places
    records.append(recorded, [row("a", 1.0), row("b", error="old failure")])
    imported = [row("a", error="out of memory"), row("b", error="new failure")]
    records.append(out / "card" / "e.jsonl", imported)
    (done,) = import_results(out, root)
    assert values(recorded) == {"a": 1.0, "b": "new failure"}
    assert (done.taken, done.kept) == (1, 1)


def test_one_broken_file_stops_everything_before_it_starts(places: tuple[Path, Path, Path]) -> None:
    out, root, recorded = places
    records.append(out / "card" / "e.jsonl", [row("a", 1.0)])
    (out / "card" / "f.jsonl").write_text('{"experiment": "f"}\n')
    with pytest.raises(ValueError, match=r"f\.jsonl"):
        import_results(out, root)
    assert not recorded.exists()


def test_nothing_to_import_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no <machine>/<experiment>"):
        import_results(tmp_path)


def test_published_numbers_cannot_be_overwritten(places: tuple[Path, Path, Path]) -> None:
    out, root, _ = places
    records.append(out / "published" / "e.jsonl", [row("a", 1.0)])
    with pytest.raises(ValueError, match="'published' holds the papers' numbers"):
        import_results(out, root)


def refused(places: tuple[Path, Path, Path], folder: str = "card", **fields: object) -> str:
    """What import-results says of a file whose second row has these fields; nothing is merged."""
    out, root, recorded = places
    file = out / "records" / folder / "e.jsonl"
    file.parent.mkdir(parents=True)
    good = row("a", 1.0).to_json()
    file.write_text("".join(json.dumps(r) + "\n" for r in (good, good | fields)))
    with pytest.raises(ValueError, match=r"e\.jsonl") as caught:
        import_results(out, root)
    assert not recorded.exists()
    assert not root.exists()
    return str(caught.value)


WRONG = [
    ("spread_min", "<b>fast</b>", "a number"),
    ("spread_max", float("nan"), "finite"),
    ("spread_n", 2.5, "an integer"),
    ("causal", "yes", "true or false"),
    ("device", 3, "a string"),
    ("date", ["x"], "a string"),
    ("dropout", True, "a number"),
    ("seqlen_q", -1, "negative"),
    ("value", "1", "a number"),
    ("source", "published", "not 'measured'"),
    ("value", 10**400, "finite"),
    ("note", "\x1b[31mred", r"note='\x1b[31mred' has control characters"),
    ("note", "\ud800", r"note='\ud800' has control"),
    ("note", "a\u202eb", "has control"),
    ("colour", "a\x00b", "colour="),
    ("experiment", "other", "'other' is not 'e'"),
    ("experiment", "../other", "is not 'e'"),
]


@pytest.mark.parametrize(("field", "value", "says"), WRONG)
def test_a_row_that_cannot_be_right_is_named_with_file_and_line(
    places: tuple[Path, Path, Path], field: str, value: object, says: str
) -> None:
    message = refused(places, **{field: value})
    assert "line 2" in message
    assert says in message


@pytest.mark.parametrize("folder", ["<img src=x onerror=alert(1)>", "Card", "published", ".hidden", "a b", "ü"])
def test_a_folder_that_cannot_be_a_machine_is_named(places: tuple[Path, Path, Path], folder: str) -> None:
    assert repr(folder) in refused(places, folder)


@pytest.mark.parametrize("into", ["published", "registered", "../elsewhere", "/tmp/x", "a/b", "", "..", "Ä"])
def test_measurements_go_nowhere_else(tmp_path: Path, into: str) -> None:
    from repro import experiments
    from repro.measure import measure

    with pytest.raises(ValueError, match=r"results|papers"):
        run.measure(experiments.experiment("fig2-middle"), into=into, root=tmp_path)
    with pytest.raises(ValueError, match=r"results|papers"):
        measure(["fig2-middle"], into=into)
    assert not list(tmp_path.iterdir())


def test_a_link_is_not_followed(places: tuple[Path, Path, Path], tmp_path: Path) -> None:
    out, root, _ = places
    records.append(tmp_path / "private.jsonl", [row("a", 1.0)])
    (out / "card").mkdir(parents=True)
    (out / "card" / "e.jsonl").symlink_to(tmp_path / "private.jsonl")
    with pytest.raises(ValueError, match="a link"):
        import_results(out, root)


def packed(out: Path, **files: bytes) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / ARCHIVE, "w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def test_the_archive_of_a_run_is_imported(places: tuple[Path, Path, Path]) -> None:
    out, root, recorded = places
    records.append(out / "made.jsonl", [row("a", 1.0)])
    data = (out / "made.jsonl").read_bytes()
    packed(out, **{"gpu-run/records/card/e.jsonl": data, "gpu-run/summary.txt": b"x"})
    for source in (out, out / ARCHIVE):
        import_results(source, root)
        assert values(recorded) == {"a": 1.0}


@pytest.mark.parametrize("name", ["gpu-run/../../x", "/etc/x", "x", "../x"])
def test_an_archive_is_trusted_with_nothing(places: tuple[Path, Path, Path], name: str) -> None:
    out, root, _ = places
    packed(out, **{"gpu-run/records/card/e.jsonl": b"", name: b"x"})
    with pytest.raises(ValueError, match="leads out"):
        import_results(out, root)
    (out / ARCHIVE).write_bytes((out / ARCHIVE).read_bytes()[:60])
    with pytest.raises(ValueError, match="not a whole"):
        import_results(out, root)


def test_an_archive_with_links_or_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        entry = tarfile.TarInfo("a/link")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(entry)
    with pytest.raises(ValueError, match="no plain file"):
        archive.extract(path, tmp_path / "to")
    packed(tmp_path, **{"a/b": b"x" * 100})
    monkeypatch.setattr(archive, "EXTRACT_LIMIT_BYTES", 99)
    with pytest.raises(ValueError, match="1 files of 100 bytes"):
        archive.extract(tmp_path / ARCHIVE, tmp_path / "to")


def test_one_command_judges_what_a_run_brings_back(
    places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predicted, measured, ratio to the best competing implementation a shape, and the means."""
    out, root, _ = places
    cells = [c for c in gpu_throughput.cells() if c["head_dim"] == 128 and not c["causal"]]
    tflops = {"flash-sm90": 600.0, "flash-sm90-optimistic": 660.0, "sdpa-flash": 400.0, "sdpa-cudnn": 500.0}
    rows = [
        records.record(
            cell,
            experiment=gpu_throughput.EXPERIMENT.name,
            implementation=name,
            source="measured",
            metric="throughput_tflops",
            value=value,
            unit="TFLOP/s",
            device="NVIDIA H200",
            cell=cell.id,
        )
        for cell in cells
        for name, value in tflops.items()
    ]
    records.append(out / "nvidia-h200" / "gpu-throughput.jsonl", rows)
    lines = report(import_results(out, root))
    assert f"nvidia-h200/gpu-throughput.jsonl: {len(rows)} rows imported, 0 kept" in lines[0]
    table = [line.split() for line in lines if line.startswith(("forward ", "backward "))]
    shapes = [words for words in table if len(words) > 8 and words[4].isdigit()]
    assert len(shapes) == len(cells) == 12
    cell = next(c for c in cells if c["pass"] == "forward" and c["seqlen_q"] == 16384)
    bound = next(
        r.value
        for r in gpu_throughput.EXPERIMENT.predicted(cell)
        if r.implementation == "flash-sm90" and r.device == H200.name
    )
    words = next(w for w in shapes if w[:4] == ["forward", "128", "-", "16384"])
    assert words[4:] == [f"{bound:.0f}", "600", "sdpa-cudnn", "500", "1.20", "660", "1.32"]
    text = "\n".join(lines)
    assert "exact forward: 1.200 x the best competing implementation" in text
    assert "optimistic forward: 1.320 x" in text
    assert "backward: 1.200 x cuDNN" in text
    monkeypatch.setattr(records, "RESULTS", root)
    main([str(out)])
    assert "optimistic forward: 1.320 x" in capsys.readouterr().err


def test_the_table_of_claims_is_written_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that fills up while it is written leaves the old one."""
    from figures import __main__ as command
    from figures import common, verdict_table
    from repro.claims import Evidence, Finding, Part, rows

    part = Part(what="a", value=1, low=0, evidence=Evidence.COUNTED)
    one = rows()["SM boundary"].found(Finding(parts=[part]))
    monkeypatch.setattr(verdict_table, "collect", lambda: [one])
    monkeypatch.setattr(common, "OUT", tmp_path)
    command.verdicts()
    whole = (tmp_path / "verdicts.csv").read_text()
    assert whole.startswith("claim,")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "verdicts.csv")

    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match=r"verdicts\.csv"):
        command.verdicts()
    assert (tmp_path / "verdicts.csv").read_text() == whole


def test_claims_that_change_are_told() -> None:
    from dataclasses import replace

    from figures.verdict_table import changes
    from repro.claims import Claim, Evidence, Finding, Part, rows

    def claim(name: str, part: Part) -> Claim:
        return rows()[name].found(Finding(parts=[part]))

    part = Part(what="a", value=1, low=0, evidence=Evidence.COUNTED)
    before = [claim("SM boundary", part), claim("K5", part)]
    worse = replace(part, value=-1.0)
    after = [claim("SM boundary", part), claim("K5", worse)]
    assert changes(before, before) == ["claims that change: 0 of 2"]
    first, second = changes(before, after)
    assert first == "claims that change: 1 of 2"
    how = f"({Evidence.COUNTED})"
    assert second.startswith(f"K5: reproduced {how} -> refuted {how}: a -1")
