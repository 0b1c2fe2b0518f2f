"""One prepared run on a rented GPU: the most valuable results first, within a budget of seconds.

    make gpu-run BUDGET_S=480 OUT=dir        (or: python -m repro.gpu.run --budget-s 480 --out dir)
    make gpu-run DRY=1                       the plan, with predicted seconds, on any machine

Every stage is a process of its own with a share of what is left, so a hung kernel or a tool that
refuses costs that stage and nothing else. A stage that cannot fit is skipped and says so. What is
found wrong, hung or slower than the step below is left out of dispatch for the rest of the run.

OUT receives two files, written anew after every stage and several times a minute, so that whatever
kills the run loses little: ``gpu-run.tar.gz`` with records, logs, the environment and the guard's
verdicts, and ``summary.txt``. A run whose OUT has such an archive goes on from its records.
``make import-results FROM=OUT`` merges and judges them.

Nothing is installed and nothing outside OUT and the kernel cache is written. Python, torch, CuPy
and numpy are enough; a stage that needs more (pytest, ncu) fails alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.dispatch import CHECKED_VARIABLE
from repro import cli
from repro.archive import environment, extract
from repro.gpu import judgement
from repro.gpu.plan import Stage, plan_text, stages
from repro.instruments.hopper_guard import Findings
from repro.measuring import machine, processes, records
from repro.measuring.progress import say

ARCHIVE, SUMMARY = "gpu-run.tar.gz", "summary.txt"
#: What of a stage's log is kept: its end.
LOG_BYTES = 512 * 1024
#: How often what there is so far is written during a stage.
EVERY_S = 20.0


@dataclass(frozen=True)
class Ending:
    """How a stage ended: "ok", "failed (…)", "out of time" or "skipped (…)"."""

    stage: Stage
    outcome: str
    seconds: float


class Run:
    """A run in progress: its working folder, and what is carried home."""

    def __init__(self, out: Path, work: Path, budget_s: float) -> None:
        self.out, self.work, self.budget_s = out, work, budget_s
        self.endings: list[Ending] = []
        self.started = time.monotonic()
        for folder in (out, work / "records", work / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        self.note("")

    @property
    def checked(self) -> Path:
        return self.work / "hopper.json"

    def rows(self) -> list[records.Record]:
        """What is on record so far."""
        files = sorted((self.work / "records").glob("*/*.jsonl"))
        return [row for file in files for row in records.read(file)]

    def note(self, at: str) -> None:
        """Write the archive and the summary as they are now. ``at``: the stage in progress.

        A full disk is said, and the run goes on.
        """
        try:
            self._write(at)
        except OSError as error:
            say(f"{self.out}: {error.strerror}; what this run has found is not written")

    def _write(self, at: str) -> None:
        text = self.summary(at)
        (self.work / SUMMARY).write_text(text, encoding="utf-8")
        draft = self.out / f".{ARCHIVE}"
        with tarfile.open(draft, "w:gz") as tar:
            for path in sorted(self.work.rglob("*")):
                if path.is_file() and not path.name.startswith("."):
                    name = path.relative_to(self.work).as_posix()
                    data = path.read_bytes()
                    entry = tarfile.TarInfo(f"gpu-run/{name}")
                    data = data[-LOG_BYTES:] if name.startswith("logs/") else data
                    entry.size, entry.mtime = len(data), int(time.time())
                    tar.addfile(entry, io.BytesIO(data))
        draft.replace(self.out / ARCHIVE)
        _write(self.out / SUMMARY, text)

    def summary(self, at: str = "") -> str:
        """Stages and how they ended, what is left out of dispatch, and what was found."""
        card = machine.gpu()
        lines = [
            f"{card.name if card else 'no GPU'}, driver {card.driver if card else '-'}, commit "
            f"{machine.commit() or 'unknown'}",
            f"{time.monotonic() - self.started:.0f} s of {self.budget_s:.0f} s",
            "",
        ]
        lines += [
            f"{e.stage.name:16} {e.seconds:7.1f} s of {e.stage.predicted_s:5.0f} s predicted  {e.outcome}"
            for e in self.endings
        ]
        if at:
            lines.append(f"{at:16} in progress")
        if self.checked.exists():
            refused = Findings.read(self.checked).refused
            lines += ["", f"left out of dispatch: {len(refused)} Hopper implementations"]
            lines += [f"  {name}: {why}" for name, why in refused.items()]
        return "\n".join([*lines, "", *self._judged()]).rstrip() + "\n"

    def _judged(self) -> list[str]:
        """What the records say. A fault in judging must not end a run that measures."""
        try:
            return judgement.judge(self.rows(), predict=False)
        except Exception as error:
            return [f"not judged: {type(error).__name__}: {error}"]

    def leave_out_slow_forms(self) -> None:
        """Add to the guard's verdicts what the throughput says of the Hopper forms."""
        found = Findings.read(self.checked) if self.checked.exists() else Findings()
        try:
            slow = judgement.left_out(judgement.shapes(self.rows(), predict=False))
        except Exception as error:  # as above
            say(f"the Hopper forms are not judged: {type(error).__name__}: {error}")
            return
        for name, why in slow.items():
            if name not in found.refused:
                say(f"left out of dispatch from here on: {name}: {why}")
                found.refused[name] = why
        found.write(self.checked)


def run(
    plan: Sequence[Stage], out: Path, budget_s: float, *, clock: Callable[[], float] = time.monotonic
) -> list[Ending]:
    """Run the stages that fit and return how each ended. Raises ValueError for a bad budget."""
    if not budget_s > 0:
        raise ValueError(f"the budget must be positive, got {budget_s} s")
    started = clock()
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as folder, processes.stopped_politely():
        work = Path(folder)
        if (out / ARCHIVE).exists():
            extract(out / ARCHIVE, work)
            shutil.rmtree(work / "logs", ignore_errors=True)
        this = Run(out, work, budget_s)
        (work / "environment.txt").write_text(_environment(), encoding="utf-8")
        (work / "plan.txt").write_text(plan_text(plan, budget_s) + "\n", encoding="utf-8")
        for number, stage in enumerate(plan):
            left = budget_s - (clock() - started)
            if left < stage.least_s:
                ending = Ending(stage, f"skipped ({max(left, 0):.0f} s left)", 0.0)
            else:
                began = clock()
                log = work / "logs" / f"{number:02}-{stage.name}.txt"
                outcome = _run_stage(stage, stage.share * left, this, log)
                ending = Ending(stage, outcome, clock() - began)
                if stage.name == "gpu-throughput":
                    this.leave_out_slow_forms()
            this.endings.append(ending)
            say(f"{stage.name}: {ending.outcome}, {ending.seconds:.1f} s")
            this.note("")
    return this.endings


def _run_stage(stage: Stage, limit_s: float, this: Run, log: Path) -> str:
    ends = time.monotonic() + limit_s
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "REPRO_RESULTS": str(this.work / "records"),
        CHECKED_VARIABLE: str(this.checked),
        processes.ENDS_VARIABLE: repr(ends),
    }
    with open(log, "wb") as output:
        try:
            # A session of its own, so that whatever it starts can be found and ended with it.
            process = processes.start(
                stage.command,
                session=True,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=processes.die_with_parent,
            )
        except OSError as error:
            return f"failed ({error})"
        try:
            while True:
                left = ends - time.monotonic()
                if left <= 0:
                    return f"out of time (stopped after {limit_s:.0f} s)"
                try:
                    code = process.wait(timeout=min(left, EVERY_S))
                    break
                except subprocess.TimeoutExpired:
                    this.note(stage.name)
        finally:
            _stop(process)
    return "ok" if code == 0 else f"failed (exit {code}: {_last_line(log)})"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask once, so that the cell in progress is left cleanly, then kill all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    processes.kill(process)


def _last_line(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "no output"


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _environment() -> str:
    """Machine and packages, and what the driver's tool says of the card."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=30,
            check=False,
        )
        said = done.stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = f"nvidia-smi: {error}\n"
    return f"{environment()}\n{said}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what this GPU can within the budget, the most valuable results first."""
    parser = argparse.ArgumentParser(prog="python -m repro.gpu.run", description=main.__doc__)
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for the whole run")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for results")
    parser.add_argument("--only", action="append", default=[], help="run only these stages")
    parser.add_argument("--dry", action="store_true", help="print the plan and run nothing")
    parser.add_argument("--cores", type=int, help="of the machine that the plan is for")
    given = parser.parse_args(arguments)
    plan = stages(cores=given.cores)
    unknown = set(given.only) - {stage.name for stage in plan}
    if unknown:
        known = ", ".join(stage.name for stage in plan)
        raise ValueError(f"no stage {', '.join(sorted(unknown))}; known: {known}")
    plan = [stage for stage in plan if not given.only or stage.name in given.only]
    if given.dry:
        print(plan_text(plan, given.budget_s))
        return
    if machine.gpu() is None:
        raise RuntimeError("needs an NVIDIA GPU, none found (no driver answers)")
    endings = run(plan, given.out, given.budget_s)
    if not any(e.outcome == "ok" for e in endings):
        raise RuntimeError(f"no stage succeeded; see {given.out / SUMMARY}")


if __name__ == "__main__":
    sys.exit(cli.program(main))
