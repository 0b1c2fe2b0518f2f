"""The wheel carries kernels, headers and page parts, and works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from repro.measuring import machine

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("analysis", "kernels", "repro", "figures")


def project_files() -> list[Path]:
    """Files of the packages as they are in the work tree, without what is generated."""
    generated = {"__pycache__", "out"}
    return [
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*"))
        if path.is_file() and not generated & set(path.relative_to(ROOT).parts)
    ]


def record_files() -> list[Path]:
    """The committed records, and what was read of machine code."""
    found = (path.relative_to(ROOT) for path in sorted((ROOT / "results").glob("*/*")))
    kept = (".jsonl", ".csv", ".xz")
    return [path for path in found if path.parent.name != "local" and path.suffix in kept]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder appears in the checkout."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    top = map(Path, ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"))
    own = source / "results" / "local" / "mine.jsonl"  # of this machine: not for others
    own.parent.mkdir(parents=True)
    own.write_text("")
    for name in [*project_files(), *record_files(), *top]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-w", str(out)]
    command = [*pip, *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_every_file_of_the_packages_is_in_the_wheel_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    packages = {path.as_posix() for path in project_files()}
    assert names == packages | {f"repro/{path.as_posix()}" for path in record_files()}
    assert "repro/results/published/fig2-left.jsonl" in names
    assert any(n.endswith(".cu") for n in names)
    assert any(n.endswith(".cuh") for n in names)
    assert {n.split("/")[0] for n in names} == set(PACKAGES)


def away(installed: Path, folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "REPRO_CACHE_DIR": str(folder / "c")}
    environment |= variables
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_records_come_with_it_and_nothing_is_left_behind(installed: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    environment = {"REPRO_CACHE_DIR": str(tmp_path / "cache")}
    for command in (
        ("compare", "host", "host", "-e", "fig2-left"),
        ("explain", "fig2-left"),
        ("predict", "-n", "1k", "--gpu", "H200", "--ceilings", "measured"),
    ):
        done = away(installed, here, "-m", "repro", *command, **environment)
        assert done.returncode == 0, (command, done.stderr)
    assert list(here.iterdir()) == []
    code = (
        "from repro.measuring import records\n"
        "r = records.load(['fig2-left'])\n"
        "assert {'published', 'host'} <= {x.extra['machine'] for x in r}\n"
        "own = [x for x in records.recorded('host', 'fig2-left') if x.cell]\n"
        "own = [x for x in own if x.cell == own[0].cell]\n"
        "records.append(records.RESULTS / 'host' / 'fig2-left.jsonl', own)\n"
        "assert len(records.load(['fig2-left'])) == len(r), 'a cell that is in both counts once'\n"
    )
    done = away(installed, here, "-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(here / "results").is_dir()


def test_what_was_read_of_machine_code_comes_with_it(installed: Path, tmp_path: Path) -> None:
    code = (
        "from repro.timing import flash2_time, flash3_time, peers, prototype\n"
        "assert len(peers.comparisons()) == len(peers.predicted())\n"
        "assert flash2_time.version() and flash3_time.points() and prototype.variants()\n"
    )
    done = away(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    moved = away(installed, tmp_path, "-c", code, REPRO_RESULTS=str(tmp_path / "elsewhere"))
    assert moved.returncode == 0, moved.stderr


def test_it_runs_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    code = (
        "import analysis, figures.report, kernels, repro, sys\n"
        "from repro.measuring import machine, records\n"
        "from kernels.launch import INCLUDE_DIR, KERNELS_DIR\n"
        "assert INCLUDE_DIR.is_dir() and list(KERNELS_DIR.glob('*.cu'))\n"
        "assert not machine.CHECKOUT and machine.commit() is None\n"
        "print(kernels.__file__, records.RESULTS)\n"
    )
    done = away(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    where, results = done.stdout.split()
    assert Path(where).is_relative_to(installed)
    assert Path(results) == tmp_path / "results", "an installed package writes where it is used"
    done = away(installed, tmp_path, "-m", "repro", "predict", "-n", "512", "--csv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("algorithm,pass,")


@pytest.mark.thorough
@pytest.mark.skipif(not any(shutil.which(c) for c in ("c++", "g++", "clang++")), reason="no C++ compiler")
def test_kernels_compile_and_count_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    code = (
        "import numpy as np\n"
        "from kernels.beside import online_softmax\n"
        "from kernels.host import HostBackend\n"
        "from kernels.launch import from_numpy\n"
        "x = np.random.default_rng(0).standard_normal((3, 100)).astype(np.float32)\n"
        "y = np.empty_like(x)\n"
        "backend = HostBackend()\n"
        "online_softmax.softmax(backend, 'online', from_numpy('x', x, access='r'),\n"
        "                       from_numpy('out', y, access='w'))\n"
        "e = np.exp(x - x.max(1, keepdims=True)); e /= e.sum(1, keepdims=True)\n"
        "assert np.abs(y - e).max() < 1e-6\n"
        "print(sum(sum(t.values()) for t in backend.traffic.values()))\n"
    )
    done = away(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2 * 3 * 100 * 4


def test_versions_agree() -> None:
    """pyproject.toml, the citation and the changelog name the same version."""
    version = machine.project_version()
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {version}" in citation.replace('"', "").replace("'", "")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_archive_is_complete_checked_and_the_same_twice(tmp_path: Path) -> None:
    import hashlib

    from repro import archive

    drawn = tmp_path / "out"
    drawn.mkdir()
    with pytest.raises(ValueError, match="make figures"):
        archive.write(tmp_path / "empty.tar.gz", drawn)
    assert not (tmp_path / "empty.tar.gz").exists()
    (drawn / "a.svg").write_text("<svg/>")
    (drawn / "verdicts.md").write_text("| |")
    (drawn / ".draft.svg").write_text("half")
    # A link that leads out of the checkout is not followed.
    (tmp_path / "private.csv").write_text("secret")
    (drawn / "private.csv").symlink_to(tmp_path / "private.csv")
    first, second = tmp_path / "1" / "x.tar.gz", tmp_path / "2" / "x.tar.gz"
    names = archive.write(first, drawn)
    assert archive.write(second, drawn) == names
    assert "figures/out/private.csv" not in names
    assert first.read_bytes() == second.read_bytes()
    assert {
        "figures/out/a.svg",
        "figures/out/verdicts.md",
        "COMMIT",
        "ENVIRONMENT",
        "LICENSE",
        "requirements.lock",
        "analysis/traffic.py",
        "SHA256SUMS",
    } <= set(names)
    assert "figures/out/.draft.svg" not in names
    assert any(n.startswith("results/published/") for n in names)
    with tarfile.open(first) as tar:
        members = {m.name.removeprefix("x/"): m for m in tar.getmembers()}
        sums = tar.extractfile("x/SHA256SUMS")
        assert sums is not None
        for line in sums.read().decode().splitlines():
            digest, name = line.split("  ", 1)
            content = tar.extractfile(f"x/{name}")
            assert content is not None
            assert hashlib.sha256(content.read()).hexdigest() == digest
    assert len(members) == len(names)
