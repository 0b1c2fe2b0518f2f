"""Records of a run elsewhere find their place, and nothing good is lost on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import records
from repro.import_results import import_results
from repro.records import Record


def row(cell: str | None, value: float | None = None, error: str | None = None) -> Record:
    unit = None if value is None else "ms"
    return Record(
        experiment="e", implementation="i", metric="time_ms", source="measured", value=value,
        unit=unit, error=error, cell=cell,
    )  # fmt: skip


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


def test_importing_twice_changes_nothing(places: tuple[Path, Path, Path]) -> None:
    out, root, recorded = places
    records.append(out / "card" / "e.jsonl", [row("a", 1.0), row(None, 2.0)])
    import_results(out, root)
    import_results(out, root)
    assert values(recorded) == {"a": 1.0, None: 2.0}
    assert len(list(records.read(recorded))) == 2


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
    with pytest.raises(ValueError, match="published numbers are not imported"):
        import_results(out, root)
