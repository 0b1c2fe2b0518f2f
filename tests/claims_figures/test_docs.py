"""The tutorial runs, the documentation builds without a warning, and what it names exists."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import repro
from repro import experiments
from tests.support.command_support import run

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "pages"
NOTEBOOK = ROOT / "docs" / "tutorial" / "from_shape_to_plan.ipynb"


@pytest.mark.thorough
@pytest.mark.skipif(not any(shutil.which(c) for c in ("c++", "g++", "clang++")), reason="no C++ compiler")
def test_the_tutorial_runs_from_beginning_to_end() -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = [shown(cell) for cell in notebook.cells]
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    texts = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "equal to the byte" in texts
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())}
    assert "image/png" in kinds
    for before, cell in zip(stored, notebook.cells, strict=True):
        assert shown(cell) == before, cell.source


def shown(cell: Any) -> str:
    """The text that a cell shows, without what another machine shows otherwise."""
    text = "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", ())
    )
    # Times, and the plan that follows from them; rounding of this machine's exponentials.
    return re.sub(r"(optimal: |largest error ).*", r"\1...", text)


def test_the_tutorial_the_command_and_the_library_give_one_time(capsys: pytest.CaptureFixture[str]) -> None:
    """And they are those that the notebook was stored with."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    cell = next(c for c in cells if "predict(" in "".join(c["source"]))
    stored = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
    exec("".join(cell["source"]), {})
    assert capsys.readouterr().out == stored
    line = "predict -a standard,flash,auto --pass forward --gpu H200 --json"
    status, out, _ = run(capsys, *line.split())
    assert status == 0
    points = json.loads(out)
    found = dict(re.findall(r"^(\S+) .* at least +(\d+) µs", stored, re.M))
    assert found == {p["algorithm"]: f"{p['time_bound_s'] * 1e6:.0f}" for p in points}
    shape = repro.AttentionShape(1, 16, 4096, 4096, 128, dtype="bf16")
    library = repro.predict("auto", shape, "forward", "H200")
    assert found[library.algorithm] == f"{library.time.seconds * 1e6:.0f}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built so that a warning is an error."""
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package, reason="needs mkdocs-material and mkdocstrings")
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "-f",
            str(ROOT / "docs" / "mkdocs.yml"),
            "-d",
            str(folder),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.thorough
def test_the_documentation_builds_and_loads_nothing_from_elsewhere(site: Path) -> None:
    reference = (site / "api" / "attention.html").read_text(encoding="utf-8")
    assert 'id="analysis.traffic.predict_traffic"' in reference
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:link|script|img|iframe)\b[^>]*?(?:src|href)="([^"]+)"', text)
        assert any("assets/extra.css" in link for link in loaded)
        assert not [link for link in loaded if re.match(r"(https?:)?//", link)], page.name
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", text), sheet.name


CHROMIUM = next((n for n in ("chromium", "chromium-browser", "google-chrome") if shutil.which(n)), None)


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_page_from_the_disk_is_searched_without_a_network(site: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--virtual-time-budget=5000",
            "--dump-dom",
            f"{(site / 'commands.html').as_uri()}?q=sawtooth",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', done.stdout)
    assert any("l2.html" in link for link in found), found


def commands() -> list[str]:
    """Command lines of ours that the documentation shows."""
    found = []
    for page in [*sorted(PAGES.glob("*.md")), ROOT / "README.md"]:
        for line in page.read_text().splitlines():
            match = re.match(r"\s*(?:\$ )?python -m repro (.+?)(?:\s{2,}#.*)?$", line)
            if match:
                found.append(match[1].strip())
    return sorted(set(found))


@pytest.mark.parametrize("line", commands())
def test_a_command_that_the_documentation_shows_works(line: str, tmp_path, monkeypatch, capsys):
    arguments = shlex.split(line)
    long = line == "judge" or "--again" in line or "mymodule" in line
    if long or arguments[0] in ("measure", "archive", "compare", "cubin"):
        arguments = [arguments[0], "--help"]  # takes long, or needs what only a reader has
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *arguments)
    assert status == 0, err
    assert out


def shown_outputs() -> list[tuple[str, list[str]]]:
    """Commands of the README whose output it shows, with the lines shown; "..." leaves some out."""
    found = []
    text = (ROOT / "README.md").read_text()
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        first, *lines = block.splitlines()
        found.append((first.removeprefix("$ python -m repro "), lines))
    return found


@pytest.mark.parametrize(("line", "lines"), shown_outputs(), ids=lambda x: str(x)[:20])
def test_the_readme_shows_what_its_commands_print(line, lines, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    # From committed records: what this machine has measured would stand in the place of some.
    monkeypatch.setattr(experiments, "tidy", partial(experiments.tidy, local=False))
    status, out, err = run(capsys, *shlex.split(line))
    assert status == 0, err
    printed = [x.rstrip() for x in out.splitlines()]
    assert len(lines) > 3
    for shown_line in lines:
        assert shown_line == "..." or shown_line in printed


def test_every_subcommand_and_module_in_the_documentation_exists() -> None:

    from repro.__main__ import COMMANDS

    names = set(COMMANDS)
    described = set(re.findall(r"^## (\w+)$", (PAGES / "commands.md").read_text(), re.MULTILINE))
    assert described == names - {"list"}
    for page in PAGES.rglob("*.md"):
        for module in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            importlib.import_module(module)
        for path in re.findall(r"`((?:examples|docs|analysis|kernels|repro|figures)/[\w./]*)`", page.read_text()):
            if path.startswith("figures/out"):
                continue  # made by the commands, not there in a fresh checkout
            assert (ROOT / path).exists(), f"{page.name}: {path}"
