"""Where results, figures, caches and locks go, and that a read-only checkout is enough."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repro.measuring import machine, quiet

ROOT = Path(__file__).resolve().parents[2]

MEASURE = """
from repro.measuring import quiet, records
from repro.measuring.records import Record
row = Record(experiment="x", implementation="y", metric="z", source="measured", value=1, unit="s")
with quiet.alone():
    records.append(records.RESULTS / "local" / "x.jsonl", [row])
assert len(records.load(["x"])) == 1 and len(records.load(["fig2-left"])) > 10
"""


def run(root: Path, command: tuple[str, ...], **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=root,
        env={**os.environ, **variables},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive as it is unpacked: no git, inside somebody's repository."""
    outer = tmp_path_factory.mktemp("outer")
    if shutil.which("git"):
        subprocess.run(["git", "init", "-q", str(outer)], check=True)
    copy = outer / "recompute-repro-0.1"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "out", "local")
    for name in ("analysis", "kernels", "repro", "figures", "results"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("pyproject.toml", "LICENSE", "requirements.lock", "README.md"):
        shutil.copy(ROOT / name, copy)
    return copy


def snapshot(folder: Path) -> set[str]:
    return {p.as_posix() for p in folder.rglob("*") if "__pycache__" not in p.parts}


@pytest.mark.thorough
def test_nothing_is_written_where_nothing_may_be(checkout: Path, tmp_path: Path) -> None:
    """A file in the place of .cache: no process, root's either, can write there."""
    (checkout / ".cache").write_text("")
    before = snapshot(checkout)
    variables = {
        "REPRO_RESULTS": str(tmp_path / "results"),
        "REPRO_FIGURES": str(tmp_path / "drawn"),
        "REPRO_CACHE_DIR": str(tmp_path / "cache"),
    }
    run(checkout, ("-c", MEASURE), **variables)
    said = run(checkout, ("-m", "figures", "draw", "gemm_levels"), **variables)
    assert said == f"{tmp_path}/drawn/gemm_levels.svg\n"
    assert snapshot(checkout) == before
    assert (tmp_path / "cache" / "lock").exists()
    drawn = {p.name for p in (tmp_path / "drawn").iterdir()}
    assert drawn == {f"gemm_levels.{ending}" for ending in ("csv", "png", "svg")}
    # What others measured and published is seen beside what is measured here.
    assert "measured" in (tmp_path / "drawn" / "gemm_levels.csv").read_text()
    assert [p.name for p in (tmp_path / "results").iterdir()] == ["local"]


def test_a_source_archive_has_no_commit_of_the_repository_around_it(checkout: Path) -> None:
    code = (
        "from repro import archive\nfrom repro.measuring import machine\n"
        "print(machine.commit(), archive._commit_time(), *archive._tracked(), sep='\\n')"
    )
    commit, moment, *names = run(checkout, ("-c", code)).splitlines()
    assert (commit, moment) == ("None", "0")
    assert {"LICENSE", "requirements.lock", "README.md", "repro/archive.py"} <= set(names)


def test_a_lock_that_cannot_be_made_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(machine, "CHECKOUT", False)
    monkeypatch.setenv("REPRO_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot make .*file/lock .*set REPRO_CACHE_DIR"), quiet.alone():
        pass
