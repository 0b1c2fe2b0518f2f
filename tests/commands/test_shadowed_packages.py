"""A user's own analysis.py (or kernels/, or figures/) in the working directory is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """As a user with the packages installed: their folder comes after the working directory."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f":{ROOT}"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "kind", "start"),
    [("analysis", "module", "import repro"), ("kernels", "package", "import figures"), ("analysis", "package", "-m")],
)
def test_the_file_is_named_in_one_line(tmp_path: Path, name: str, kind: str, start: str) -> None:
    file = tmp_path / (f"{name}.py" if kind == "module" else f"{name}/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('the wrong one was run')\n")
    done = run(tmp_path, *(["-m", "repro", "doctor"] if start == "-m" else ["-c", start]))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.removeprefix("ImportError: ") == (
        f"{file} is imported as {name!r} in the place of {ROOT / name}, which recompute-repro "
        "needs: rename it, or start Python in another folder"
    )


def test_doctor_names_a_shadowed_figures(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "__init__.py").write_text("")
    code = "from repro import doctor; print([f.detail for f in doctor.shadows()])"
    done = run(tmp_path, "-c", code)
    assert f"{tmp_path}/figures/__init__.py is imported in the place of" in done.stdout, done.stderr


def test_folders_that_are_no_packages_are_in_nobodys_way(tmp_path: Path) -> None:
    for name in ("analysis", "kernels", "figures", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("x")
    done = run(tmp_path, "-c", "import repro, figures, kernels.launch, analysis.traffic; print('ok')")
    assert done.stdout == "ok\n", done.stderr
