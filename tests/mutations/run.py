"""Which source mutations do the tests notice?

    python tests/mutations/run.py [--tree DIR] [--into FILE] [--only TEXT]

``mutations.toml`` lists small changes to the sources: a file, a text that occurs once in it, what
takes its place, and the test files that should notice. Each is made in a copy of the tree, never in
the checkout, and those test files are run until one fails. A failure counts only if the same test
passes without the change. What has been decided already is in FILE and is not run again.

A file that has moved is found by its text. A mutation whose text is gone is reported as "gone".
``results.csv`` keeps what was noticed at 7e2fe10, before the tests of options became one suite, and
after it: run again were those that a test noticed whose file was cut, and some that had not been
run before. "survived so far" had 14 CPU seconds a test file.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import Progress

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 1200
"""A run of this length is ended; its mutation counts as noticed, as a hanging test would be."""
NO_TESTS = 5
"""pytest's exit status where nothing was selected."""
LEFT_OUT = "the rest was left out"
PRELOADED = ("torch", "numpy", "scipy", "sympy", "pandas", "hypothesis", "matplotlib", "pytest")
SOURCES = {".py", ".cu", ".cuh", ".hpp", ".h", ".c", ".cpp"}
COLUMNS = ("mutation", "result", "test", "seconds")


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Names of test files, wherever below ``tests`` they are, each perhaps with " -k WORDS"."""


def mutations(path: Path = HERE / "mutations.toml") -> list[Mutation]:
    """All of the list. ValueError names one that changes nothing, or a name that occurs twice."""
    listed = [
        Mutation(each["name"], each["file"], each["old"], each["new"], tuple(each["tests"]))
        for each in tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    ]
    names = [each.name for each in listed]
    for each in listed:
        if each.old == each.new:
            raise ValueError(f"{each.name} changes nothing")
        if names.count(each.name) > 1:
            raise ValueError(f"{each.name} is listed twice")
    return listed


def place(tree: Path, mutation: Mutation) -> Path | None:
    """The one source file with the mutation's text, or None."""
    named = tree / mutation.file
    if named.is_file() and named.read_text(encoding="utf-8").count(mutation.old) == 1:
        return named
    found = [
        path
        for folder in ("analysis", "kernels", "repro")
        for path in sorted((tree / folder).rglob("*"))
        if path.suffix in SOURCES and mutation.old in path.read_text(encoding="utf-8")
    ]
    once = len(found) == 1 and found[0].read_text(encoding="utf-8").count(mutation.old) == 1
    return found[0] if once else None


def copy_of(tree: Path, into: Path) -> Path:
    """The tracked files of a checkout, with what has been changed in them, and nothing else."""
    listed = subprocess.run(["git", "-C", str(tree), "ls-files", "-z"], check=True, capture_output=True).stdout.split(
        b"\0"
    )
    for name in filter(None, map(os.fsdecode, listed)):
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (tree / name).is_symlink():
            target.symlink_to((tree / name).readlink())
        elif (tree / name).is_file():
            target.write_bytes((tree / name).read_bytes())
    return into


def _child(copy: Path, output: Path, arguments: list[str]) -> None:
    """A fresh run of pytest in a forked process; the packages of others are loaded already."""
    os.setsid()
    with output.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    sys.argv = ["pytest"]
    import pytest

    options = ["-x", "-q", "-m", "not thorough", "-p", "no:cacheprovider", "--timeout=240"]
    try:
        code = int(pytest.main([*options, "--hypothesis-seed=0", *arguments]))
    except BaseException:
        code = 1
    sys.stdout.flush()
    os._exit(code)


def cpu_seconds(process: int) -> float:
    """Of a process and those that it has waited for."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run_tests(copy: Path, output: Path, arguments: list[str], most_cpu_s: float = 0.0) -> tuple[bool, str]:
    """Whether all passed, and the test that did not: its name, or why there is none.

    most_cpu_s: when the rest is left out, as if it passed; 0: never.
    """
    child = os.fork()
    if not child:
        _child(copy, output, arguments)
    deadline = time.monotonic() + LIMIT_S
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False, f"no end after {LIMIT_S} s"
        if most_cpu_s and cpu_seconds(child) > most_cpu_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True, LEFT_OUT
        time.sleep(0.05)
    if os.waitstatus_to_exitcode(status) in (0, NO_TESTS):
        return True, ""
    text = output.read_text(encoding="utf-8", errors="replace")
    named = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return False, named[0] if named else f"exit status {os.waitstatus_to_exitcode(status)}"


class Judge:
    """Runs mutations in one copy of a tree."""

    def __init__(self, copy: Path, most_cpu_s: float) -> None:
        self._copy = copy
        self._most_cpu_s = most_cpu_s
        self._output = copy.parent / "output.txt"
        self._sound: dict[str, bool] = {}
        self._clock = 1

    def judge(self, mutation: Mutation) -> tuple[str, str]:
        """ "killed" or "survived", "gone", or "broken" where the test fails by itself too."""
        path = place(self._copy, mutation)
        if path is None:
            return "gone", ""
        runs = [found for entry in mutation.tests for found in self._runs(entry)]
        if not runs:
            return "gone", "no test file " + ", ".join(mutation.tests)
        before, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
        self._clock += 1  # no compiled module of another second is taken for this one
        os.utime(path, (self._clock, self._clock))
        try:
            for arguments in runs:
                passed, test = run_tests(self._copy, self._output, arguments, self._most_cpu_s)
                if not passed:
                    break
        finally:
            path.write_text(before, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if passed:
            return "survived", test
        if "::" in test or test.endswith(".py"):
            if test not in self._sound:
                self._sound[test] = run_tests(self._copy, self._output, [test])[0]
            return ("killed" if self._sound[test] else "broken"), test
        return "killed", test

    def _runs(self, entry: str) -> list[list[str]]:
        """pytest's arguments for the files of an entry."""
        name, _, words = entry.partition(" -k ")
        found = sorted((self._copy / "tests").rglob(name))
        selected = ["-k", words] if words else []
        return [[str(path.relative_to(self._copy)), *selected] for path in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to copy")
    parser.add_argument("--into", type=Path, default=ROOT / ".cache" / "mutations.csv")
    parser.add_argument("--only", default="", help="mutations whose name or file has this text")
    parser.add_argument("--names", type=Path, help="a file with the names of those to run")
    parser.add_argument("--most-cpu-s", type=float, default=0.0, help="of a test file; the rest is left out")
    asked = parser.parse_args()
    chosen = [m for m in mutations() if asked.only in m.name or asked.only in m.file]
    if asked.names:
        names = set(asked.names.read_text(encoding="utf-8").split())
        chosen = [m for m in chosen if m.name in names]
    asked.into.parent.mkdir(parents=True, exist_ok=True)
    decided = set()
    if asked.into.exists():
        with asked.into.open(newline="", encoding="utf-8") as file:
            decided = {row["mutation"] for row in csv.DictReader(file)}
    else:
        asked.into.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    left = [m for m in chosen if m.name not in decided]
    Random(0).shuffle(left)  # a part of the list is a sample of it
    for name in PRELOADED:
        __import__(name)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        copy = copy_of(asked.tree.resolve(), Path(folder) / "tree")
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ.setdefault("REPRO_CACHE_DIR", str(ROOT / ".cache" / "mutations"))
        subprocess.run([sys.executable, "-m", "compileall", "-q", "."], cwd=copy, check=False)
        sys.dont_write_bytecode = True
        judge = Judge(copy, asked.most_cpu_s)
        task = progress.add_task("mutations", total=len(left))
        for mutation in left:
            progress.update(task, description=mutation.name)
            begun = time.monotonic()
            result, test = judge.judge(mutation)
            row = (mutation.name, result, test, round(time.monotonic() - begun))
            with asked.into.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(row)
            if result != "killed":
                console.print(f"{result}: {mutation.name} {test}")
            progress.advance(task)
    with asked.into.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["mutation"] in {m.name for m in chosen}]
    counts = {kind: sum(row["result"] == kind for row in rows) for kind in ("killed", "survived", "gone", "broken")}
    console.print(", ".join(f"{count} {kind}" for kind, count in counts.items()))


if __name__ == "__main__":
    main()
