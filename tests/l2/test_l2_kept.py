"""A simulated launch is kept between runs, under all that its result follows from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.hardware import H200
from analysis.l2 import L2, Pace, available, simulate
from analysis.l2 import launch as launches
from analysis.l2.attention import query_tiles_outside
from analysis.shapes import AttentionShape, Tile

pytestmark = pytest.mark.skipif(not available(), reason="no C compiler here")
TILE = Tile(128, 64)
LAUNCH = query_tiles_outside(AttentionShape(1, 1, 8192, 8192, 64), TILE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own; the compiled simulator is the one at hand."""
    assert available()
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path))
    return tmp_path / "l2"


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    true_counts = launches._counts

    def counts(launch, filled, entry, last, first=()):
        made.append(entry)
        return true_counts(launch, filled, entry, last, first)

    monkeypatch.setattr(launches, "_counts", counts)
    return made


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.json"))


def test_a_launch_is_simulated_once(folder: Path, simulations: list[str]) -> None:
    first = simulate(LAUNCH, L2.of(H200), 132, 2)
    again = simulate(LAUNCH, L2.of(H200), 132, 2)
    assert first == again
    assert first["k"].fetched > 0
    assert len(simulations) == len(files(folder)) == 1


def test_whatever_differs_is_another_launch(folder: Path, simulations: list[str]) -> None:
    l2 = L2.of(H200)
    causal = query_tiles_outside(AttentionShape(1, 1, 8192, 8192, 64, causal=True), TILE)
    asked = (
        (LAUNCH, l2, 132, 2),
        (causal, l2, 132, 2),
        (LAUNCH, replace(l2, ways=8), 132, 2),
        (LAUNCH, l2, 131, 2),
        (LAUNCH, l2, 132, 1),
        (LAUNCH, l2, 132, 2, Pace(spread=0.1)),
        (LAUNCH, l2, 132, 2, Pace(spread=0.1, seed=1)),
        (LAUNCH, l2, 132, 2, Pace(lone_speedup=2)),
    )
    for arguments in asked:
        simulate(*arguments)
    simulate(LAUNCH, l2, 132, 2, fixed=True)
    simulate(LAUNCH, l2, 132, 2, sampled_sets=17)
    simulate(LAUNCH, l2, 132, 2, burst=3)
    assert len(simulations) == len(files(folder)) == len(asked) + 3


@pytest.mark.parametrize("damage", ["cut", "other number", "other form", "empty"])
def test_a_damaged_file_counts_as_none(folder: Path, simulations: list[str], damage: str) -> None:
    true = simulate(LAUNCH, L2.of(H200), 132, 2)
    (file,) = files(folder)
    text = file.read_text()
    table = text.index("[[") + 2
    file.write_text(
        {
            "cut": text[: len(text) // 2],
            "other number": text[:table] + "1" + text[table:],
            "other form": "[1, 2]",
            "empty": "",
        }[damage]
    )
    assert simulate(LAUNCH, L2.of(H200), 132, 2) == true
    assert len(simulations) == 2
    assert file.read_text() == text


def test_a_folder_that_others_can_write_is_not_used(folder: Path, simulations: list[str]) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    first, second = (simulate(LAUNCH, L2.of(H200), 132, 2) for _ in range(2))
    assert first == second
    assert len(simulations) == 2
    assert files(folder) == []


def test_what_takes_no_time_is_not_kept(folder: Path) -> None:
    simulate(query_tiles_outside(AttentionShape(1, 1, 512, 512, 64), TILE), L2.of(H200), 132, 2)
    assert files(folder) == []
