"""The Makefile's promises, with a stand-in for Python that only writes the files.

Grouped targets run once under -j, a second make does nothing, a generator that dies half-way
leaves no target behind, and a change remakes what depends on it and nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from figures import common
from tests.support.process_support import without_make

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

PYTHON = """#!/bin/sh
# Stands in for `python -m figures draw NAME`, `-m figures verdicts`, `-m repro measure NAME`.
echo "$*" >> calls.log
out="figures/out${STYLE:+/$STYLE}"
case "$2 $3" in
"figures draw")
    mkdir -p "$out"
    shift 3
    [ "$1" = --jobs ] && shift 2
    [ "$1" = --verdicts ] && verdicts=yes && shift
    for f; do
        [ -e die ] && [ "$f" = "$(cat die)" ] && exit 1
        for e in csv png svg $FORMATS; do echo "$f" > "$out/$f.$e"; done
    done
    [ -z "$verdicts" ] || echo table > "$out/verdicts.md" ;;
"figures report") echo report > "$out/report.html" ;;
"figures verdicts") echo table > "$out/verdicts.md" ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two figures, one of an experiment that can be measured, one of records only."""
    for folder in ("figures/some", "analysis", "repro/experiments/some", "repro/measuring", "kernels", "results/card"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for name in ("__init__", "__main__", "common", "verdict_table", "_helper"):
        (tmp_path / "figures" / f"{name}.py").touch()
    (tmp_path / "figures/some/first.py").write_text('EXPERIMENTS = ("run-me", "other-records")\n')
    (tmp_path / "figures/some/second_one.py").write_text('EXPERIMENTS = ("other-records",)\n')
    for name in ("__init__", "run", "some/__init__", "some/_shared", "some/run_me"):
        (tmp_path / "repro" / "experiments" / f"{name}.py").touch()
    for name in ("repro/measuring/records.py", "analysis/a.py", "kernels/k.cu"):
        (tmp_path / name).touch()
    (tmp_path / "results" / "card" / "other-records.jsonl").touch()
    age(tmp_path)
    return tmp_path


def age(tree: Path) -> None:
    """Everything was last changed a while ago, so that a new change is newer than any target."""
    then = time.time() - 100
    for path in tree.rglob("*"):
        os.utime(path, (then, then))


def make(tree: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, list[str]]:
    """Exit status, and what the stand-in was asked for since."""
    log = tree / "calls.log"
    log.write_text("")
    done = subprocess.run(
        ["make", "NO_VENV=1", "PYTHON=./python", *arguments],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
        env=without_make() | (env or {}),
    )
    calls = log.read_text().replace(" --quick", "").replace(" --jobs 2", "")
    return done.returncode, sorted(calls.splitlines())


ALL = ["-m figures draw --verdicts first second_one", "-m repro measure run-me"]


@pytest.mark.parametrize("jobs", ["-j1", "-j8"])
def test_each_generator_runs_once_and_a_second_make_does_nothing(tree: Path, jobs: str) -> None:
    assert make(tree, jobs, "figures") == (0, ALL)
    assert {p.name for p in (tree / "figures" / "out").iterdir()} == {
        "first.svg",
        "first.png",
        "first.csv",
        "second_one.svg",
        "second_one.png",
        "second_one.csv",
        "verdicts.md",
    }
    assert make(tree, jobs, "figures") == (0, [])
    assert make(tree, "--question", "figures") == (0, [])


def test_long_experiments_are_measured_first(tree: Path) -> None:
    """So no core waits for another's last job."""
    seconds = {"short": "3", "long_one": "120", "middle": "7.5"}
    for name, value in seconds.items():
        path = tree / f"repro/experiments/some/{name}.py"
        path.write_text(f"EXPERIMENT = Experiment(\n    seconds={value},\n)\n")
    (tree / "figures/some/first.py").write_text('EXPERIMENTS = ("short", "long-one", "middle")\n')
    age(tree)
    assert make(tree, "-j1", "figures")[0] == 0
    calls = (tree / "calls.log").read_text().split("\n")
    asked = [call.split()[-1] for call in calls if "measure" in call]
    assert asked == ["long-one", "middle", "short"]


def test_one_figure_makes_just_what_it_needs(tree: Path) -> None:
    assert make(tree, "figures/out/second_one.svg") == (0, ["-m figures draw second_one"])
    assert make(tree, "figures/out/first.png") == (0, ["-m figures draw first", "-m repro measure run-me"])


@pytest.mark.parametrize("goal", ["figures", "figures/out/second_one.csv"])
def test_a_generator_that_dies_leaves_no_target_and_runs_again(tree: Path, goal: str) -> None:
    (tree / "die").write_text("second_one")
    status, _ = make(tree, "-k", goal)
    assert status != 0
    drawn = tree / "figures" / "out"
    assert not (drawn / "second_one.svg").exists()
    assert not (drawn / "verdicts.md").exists()
    (tree / "die").unlink()
    status, calls = make(tree, goal)
    assert status == 0
    verdicts = "--verdicts " if goal == "figures" else ""
    assert f"-m figures draw {verdicts}second_one" in calls  # and not the one that was drawn before
    assert (drawn / "second_one.svg").read_text() == "second_one\n"


def test_a_file_that_is_gone_is_drawn_again(tree: Path) -> None:
    assert make(tree, "figures")[0] == 0
    for ending in ("csv", "png", "svg"):
        (tree / "figures" / "out" / f"first.{ending}").unlink()
        assert make(tree, "figures") == (0, ["-m figures draw --verdicts first"])
        assert make(tree, "--question", "figures") == (0, [])


def test_more_formats_are_drawn_once(tree: Path) -> None:
    assert make(tree, "figures")[0] == 0
    assert make(tree, "figures", "FORMATS=pdf") == (0, ALL[:1])
    assert (tree / "figures" / "out" / "second_one.pdf").exists()
    assert make(tree, "--question", "figures", "FORMATS=pdf") == (0, [])
    assert make(tree, "--question", "figures") == (0, [])
    (tree / "figures" / "out" / "first.pdf").unlink()
    assert make(tree, "figures/out/first.pdf") == (0, ["-m figures draw first"])


def test_figures_for_a_paper_have_a_folder_and_a_state_of_their_own(tree: Path) -> None:
    paper = "STYLE=paper"
    assert make(tree, "figures") == (0, ALL)
    assert make(tree, "figures", paper) == (0, ALL[:1])  # nothing is measured again
    assert {p.name for p in (tree / "figures" / "out" / "paper").iterdir()} == {
        "first.svg",
        "first.png",
        "first.csv",
        "second_one.svg",
        "second_one.png",
        "second_one.csv",
        "verdicts.md",
    }
    for style in ([], [paper]):
        assert make(tree, "--question", "figures", *style) == (0, [])
    age(tree)
    (tree / "figures/some/second_one.py").touch()
    changed = ["-m figures draw --verdicts second_one"]
    for style in ([paper], []):  # drawing one style leaves the other stale
        assert make(tree, "figures", *style) == (0, changed)
        assert make(tree, "--question", "figures", *style) == (0, [])
    (tree / "figures" / "out" / "paper" / "first.png").unlink()
    assert make(tree, "figures") == (0, [])
    assert make(tree, "figures/out/paper/first.png", paper) == (0, ["-m figures draw first"])


@pytest.mark.parametrize(
    ("goal", "wrong", "said"),
    [
        ("figures", "STYLE=poster", "STYLE=poster is not paper"),
        ("report", "STYLE=paper poster", "STYLE=paper poster is not paper"),
        ("figures/out/first.svg", "FORMATS=pdf,tiff", "FORMATS=pdf,tiff: there are png svg pdf"),
        ("measure", "WORKERS=two", "WORKERS=two is no number"),
        ("figures", "WORKERS=0", "WORKERS=0 is no number"),
        ("figures", "STLYE=paper", "no variable STLYE here: there are PYTHON VENV"),
    ],
)
def test_what_is_misspelt_is_refused_before_anything_runs(tree: Path, goal: str, wrong: str, said: str) -> None:
    done = subprocess.run(
        ["make", "NO_VENV=1", "PYTHON=./python", goal, wrong],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
        env=without_make(),
    )
    assert done.returncode == 2
    assert f"*** {said}" in done.stderr
    assert not (tree / "calls.log").exists()
    assert not (tree / ".cache").exists()


def test_what_is_set_before_make_or_for_a_compiler_is_no_mistake(tree: Path) -> None:
    assert make(tree, "--question", "figures", env={"COLOUR": "red"})[0] == 1
    goal = ["--question", "figures/out/second_one.svg"]
    assert make(tree, *goal, "CXX=g++", "REPRO_CACHE_DIR=cache", "FORMATS=png,pdf")[0] == 1


def test_make_and_python_know_the_same_styles_formats_and_variables() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")

    def listed(name: str) -> list[str]:
        return re.findall(rf"^{name} := (.+)$", text, re.MULTILINE)[0].split()

    assert listed("STYLES") == list(common.STYLES)
    assert listed("IMAGES") == list(common.UNSAID)
    read = set(re.findall(r"(?:\$\(|ifdef |\$\(if \$\()([A-Z]\w*)", text))
    made = set(re.findall(r"^([A-Z]\w*) [:+]?= ", text, re.MULTILINE))
    assert set(listed("SETTINGS")) == read - made - {"MAKE", "MAKEFLAGS", "REPRO_FIGURES"}
    described = set(re.findall(r"\b([A-Z_]+)=", text.partition("PYTHON ?=")[0]))
    assert described <= set(listed("SETTINGS"))


def test_the_report_is_made_from_what_has_changed(tree: Path) -> None:
    assert make(tree, "report") == (0, sorted([*ALL, "-m figures report"]))
    assert make(tree, "report") == (0, [])
    age(tree)
    (tree / "results" / "card" / "other-records.jsonl").touch()
    status, calls = make(tree, "report")
    assert status == 0
    assert "-m figures report" in calls


def test_help_lists_every_target_that_is_for_users(tree: Path) -> None:
    done = subprocess.run(
        ["make", "NO_VENV=1", "PYTHON=./python", "help"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
        env=without_make(),
    )
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    targets = set(re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)[0].split())
    described = set(re.findall(r"make ([a-z-]+)", done.stdout))
    assert described <= targets
    authors = {"again", "lock", "readme", "record", "audit", "mutations"}
    assert targets - described <= authors


@pytest.mark.parametrize(
    ("changed", "remade"),
    [
        ("figures/some/second_one.py", ["-m figures draw --verdicts second_one"]),
        ("figures/verdict_table.py", ["-m figures verdicts"]),
        ("figures/_helper.py", ALL[:1]),
        ("figures/common.py", ALL[:1]),
        ("results/card/other-records.jsonl", ALL[:1]),
        ("kernels/k.cu", ["-m figures draw --verdicts first", *ALL[1:]]),
        ("analysis/a.py", ALL),
    ],
)
def test_a_change_remakes_what_depends_on_it(tree: Path, changed: str, remade: list[str]) -> None:
    assert make(tree, "figures")[0] == 0
    age(tree)
    (tree / changed).touch()
    assert make(tree, "figures") == (0, remade)


#: What a user may have set for figures of their own; TeX is not even installed.
MATPLOTLIBRC = """\
backend: TkAgg
text.usetex: True
savefig.transparent: True
savefig.bbox: tight
savefig.facecolor: black
axes.formatter.use_mathtext: True
axes.prop_cycle: cycler("color", ["red"])
axes.xmargin: 0.3
figure.autolayout: True
figure.figsize: 2, 2
lines.linestyle: --
lines.marker: s
path.sketch: 1, 100, 2
svg.image_inline: False
legend.loc: upper left
font.serif: Nothing
"""


@pytest.mark.thorough
def test_the_same_bytes_come_out_of_two_processes_without_a_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hash seeds, dates, random ids and a user's settings must not show in PNG, SVG or CSV."""
    (tmp_path / "matplotlibrc").write_text(MATPLOTLIBRC)
    code = (
        "import sys; from pathlib import Path\n"
        "from figures import common; from repro.experiments import tidy\n"
        "common.style(); m = common.module('two_levels')\n"
        "common.save('two_levels', m.draw(tidy(m.EXPERIMENTS, local=False)), Path(sys.argv[1]))\n"
    )
    contents = []
    for seed in ("1", "2"):
        environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / seed)],
            cwd=ROOT,
            check=True,
            env=environment | {"PYTHONHASHSEED": seed, "SOURCE_DATE_EPOCH": seed * 9},
        )
        monkeypatch.setenv("MATPLOTLIBRC", str(tmp_path))
        contents.append({p.name: p.read_bytes() for p in (tmp_path / seed).iterdir()})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 3
