"""The Makefile: dependencies, one run per generator, clear errors, nothing left half-done."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from figures import common
from repro import experiments
from tests.support.process_support import without_make

ROOT = Path(__file__).resolve().parents[2]
MAKE = shutil.which("make")

pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed")


def make(folder, *arguments, **environment):
    """Run make without a virtual environment, on a stand-in Python unless one is given."""
    values = {"NO_VENV": "1", "PYTHON": str(folder / "python"), **environment}
    return subprocess.run(
        [MAKE, *arguments, *(f"{k}={v}" for k, v in values.items())],
        cwd=folder,
        env=without_make(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def tree(tmp_path):
    """What installing looks at, and a stand-in for Python that notes what it is asked for."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\necho "$*" >> calls\n')
    stand_in.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("name", common.names())
def test_make_and_python_agree_on_what_a_figure_shows(name):
    """Make reads the tuple EXPERIMENTS from the module's text: one line."""
    text = Path(common.module(name).__file__).read_text()
    found = re.findall(r"^EXPERIMENTS = \((.*)\)$", text, re.MULTILINE)
    assert len(found) == 1, "EXPERIMENTS must be a tuple on one line"
    shown = tuple(part.strip(' "') for part in found[0].split(",") if part.strip())
    assert shown == common.module(name).EXPERIMENTS
    recorded = {p.stem for p in (ROOT / "results").glob("*/*.jsonl")}
    assert set(shown) <= set(experiments.names()) | recorded


def test_a_missing_or_old_python_is_one_line(tree):
    for python in ("no-such-python", "false"):
        done = make(tree, ".venv/.installed", NO_VENV="", PYTHON=python)
        assert done.returncode != 0
        said = [line for line in done.stderr.splitlines() if line.startswith("error")]
        assert said == [f"error: {python} is missing or older than Python 3.11; set PYTHON=..."], done.stderr
        assert not (tree / ".venv").exists()


def test_a_missing_compiler_is_one_line(tree):
    done = make(tree, ".venv/.installed", NO_VENV="", PYTHON="true", COMPILERS="no-such-cc")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert said == ["error: no C++ compiler (no-such-cc); install one or set CXX=..."]
    assert not (tree / ".venv").exists()


def locked(environment):
    """Name -> version of what the lock pins where these markers hold."""
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins), "versions only"
    found = {}
    for pin in pins:
        if pin.marker is None or pin.marker.evaluate(environment):
            assert pin.name not in found, f"{pin.name} is pinned twice"
            found[pin.name] = str(pin.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("python", ["3.11.2", "3.11.9", "3.12.3", "3.13.1", "3.14.0"])
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_every_dependency_is_locked(python, system):
    """Direct dependencies of the project and its extras, for every Python and platform."""
    import tomllib

    from packaging.requirements import Requirement

    environment = {
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "sys_platform": system,
        "platform_system": {"linux": "Linux", "darwin": "Darwin"}[system],
        "platform_machine": {"linux": "x86_64", "darwin": "arm64"}[system],
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    pins = locked(environment)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = map(Requirement, [*project["dependencies"], *(one for e in extras for one in e)])
    for one in wanted:
        if one.marker is None or one.marker.evaluate(environment):
            name = one.name.lower().replace("_", "-")
            assert name in pins, one
            assert one.specifier.contains(pins[name]), f"{one} is locked at {pins[name]}"
        else:
            assert system == "darwin", one
    # What torch brings on Linux and what our compile tests use is the same NVRTC.
    assert ("nvidia-cuda-nvrtc" in pins) == (system == "linux")
    if system == "linux":
        toolkit = pins["cuda-toolkit"].split(".")[:2]
        assert pins["nvidia-cuda-nvrtc"].split(".")[:2] == toolkit


def lock_tool():
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("lock_tool", ROOT / ".ci" / "lock.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lock_is_checked_without_this_machines_settings():
    own = {
        "PATH": "/bin",
        "HOME": "/root",
        "TMPDIR": "/t",
        "https_proxy": "p",
        "LC_ALL": "C",
        "PIP_FIND_LINKS": "/wheels",
        "PIP_EXTRA_INDEX_URL": "file:///w",
        "PIP_CERT": "/c.pem",
        "PIP_NO_INDEX": "1",
        "PIP_CONSTRAINT": "/c",
        "UV_FIND_LINKS": "/wheels",
        "UV_EXTRA_INDEX_URL": "x",
        "UV_INDEX": "y",
        "PYTHONPATH": "/p",
        "VIRTUAL_ENV": "/v",
    }
    clean = lock_tool().clean_environment(own, {"find-links": "/w", "constraint": "/c"})
    assert {k: v for k, v in clean.items() if k in own} == {
        "PATH": "/bin",
        "HOME": "/root",
        "TMPDIR": "/t",
        "https_proxy": "p",
        "LC_ALL": "C",
        "PIP_CERT": "/c.pem",
    }
    assert clean["PIP_CONFIG_FILE"] == os.devnull
    assert clean["SSL_CERT_FILE"] == "/c.pem"
    assert lock_tool().clean_environment(own, {"cert": "/d.pem"})["PIP_CERT"] == "/d.pem"


def test_the_lock_says_how_it_is_made():
    text = (ROOT / "requirements.lock").read_text()
    assert text.startswith(lock_tool().HEADER)


def test_nothing_names_a_package_index():
    for name in ("pyproject.toml", "requirements.lock", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text()
        assert not re.search(r"index-url|--find-links|https?://", text), name


def test_a_gpu_run_is_planned_run_and_judged_by_make(tree):
    assert make(tree, "gpu-run", DRY="1").returncode == 0
    assert make(tree, "gpu-run", OUT="to", BUDGET_S="300").returncode == 0
    assert make(tree, "import-results", FROM="to").returncode == 0
    assert (tree / "calls").read_text().splitlines() == [
        "-m repro.gpu.run --budget-s 480 --dry",
        "-m repro.gpu.run --budget-s 300 --out to",
        "-m figures import-results to",
    ]
    nowhere = make(tree, "gpu-run")
    assert nowhere.returncode != 0
    assert "make gpu-run OUT=dir" in nowhere.stderr
