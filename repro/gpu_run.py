"""One prepared run on a rented GPU: the most valuable results first, within a budget of seconds.

    make gpu-run BUDGET_S=480 OUT=dir        (or: python -m repro.gpu_run --budget-s 480 --out dir)

Every stage is a process of its own with a hard limit, so a hung kernel or a tool that refuses costs
that stage and nothing else. A stage that cannot fit into what is left of the budget is skipped and
says so. Results are records, appended as they come, in ``OUT/records/<experiment>.jsonl``; what
each stage printed is in ``OUT/log.txt`` and how it ended in ``OUT/summary.txt``.
``make import-results FROM=OUT`` merges the records into ``results/<machine>/``.

Nothing is installed and nothing outside OUT and the kernel cache is written.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import typer

from repro import cli, machine
from repro.instruments.hopper_guard import CHECKED_VARIABLE
from repro.progress import say


@dataclass(frozen=True)
class Stage:
    """A step of the run: a command, the seconds it may take, and why it stands where it does."""

    name: str
    command: Sequence[str]
    limit_s: float
    why: str
    #: Skip the stage when less than this is left; a stage that resumes can use any remainder.
    least_s: float = 10.0


@dataclass(frozen=True)
class Ending:
    """How a stage ended: "ok", "failed (…)", "out of time" or "skipped (…)"."""

    stage: str
    outcome: str
    seconds: float


def stages(python: str = sys.executable) -> list[Stage]:
    """The stages in order of value."""

    def measure(name: str, limit_s: float, why: str) -> Stage:
        return Stage(name, [python, "-m", "repro", "measure", name], limit_s, why)

    def pytest(name: str, limit_s: float, why: str, *args: str) -> Stage:
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args]
        return Stage(name, command, limit_s, why)

    return [
        Stage(
            "compile",
            [python, "-m", "kernels.prebuild"],
            90,
            "every variant at once on all cores, so that no later stage waits for a compiler",
        ),
        Stage(
            "hopper",
            [python, "-m", "repro.instruments.hopper_guard", "--report"],
            120,
            "which Hopper kernels are right and come back; later stages leave out the others",
        ),
        pytest(
            "smoke", 60, "a wrong kernel's speed is worth nothing", "tests/gpu", "-m", "smoke", "-x"
        ),
        measure("gpu-throughput", 150, "the headline: ours and the peers in turn, per shape"),
        measure("gpu-traffic", 120, "the other headline: counted bytes beside the prediction"),
        measure("gpu-optimistic", 30, "what the optimistic softmax gains, and loses to repair"),
        measure("gpu-sm-units", 100, "which unit of an SM is busy, beside which one should be"),
        measure("gpu-ceilings", 30, "what the time model divides by"),
        measure("gpu-memory", 30, "peak bytes against sequence length"),
        measure("gpu-ladder", 60, "time of each step of the ladder, tile by tile"),
        pytest("tests", 120, "the whole GPU suite", "tests/gpu", "--maxfail=20"),
        Stage(
            "sanitizer",
            [python, "-m", "repro.instruments.sanitizer"],
            120,
            "memcheck and racecheck on small shapes",
        ),
    ]


def run(
    plan: Sequence[Stage],
    out: Path,
    budget_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[Ending]:
    """Run the stages that fit and return how each ended. Raises ValueError for a bad budget."""
    if budget_s <= 0:
        raise ValueError(f"the budget must be positive, got {budget_s} s")
    out.mkdir(parents=True, exist_ok=True)
    started = clock()
    endings: list[Ending] = []
    with open(out / "log.txt", "ab", buffering=0) as log:
        for stage in plan:
            left = budget_s - (clock() - started)
            if left < stage.least_s:
                ending = Ending(stage.name, f"skipped ({max(left, 0):.0f} s left)", 0.0)
            else:
                log.write(f"\n=== {stage.name}: {stage.why}\n".encode())
                began = clock()
                outcome = _run_stage(stage, min(stage.limit_s, left), out, log)
                ending = Ending(stage.name, outcome, clock() - began)
            endings.append(ending)
            say(f"{ending.stage}: {ending.outcome}, {ending.seconds:.1f} s")
            _write_summary(out / "summary.txt", endings)
    return endings


def _run_stage(stage: Stage, limit_s: float, out: Path, log: IO[bytes]) -> str:
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "REPRO_RESULTS": str(out / "records"),
        CHECKED_VARIABLE: str(out.absolute() / "hopper.json"),
    }
    try:
        # A process group of its own, so that a profiler's children die with it.
        process = subprocess.Popen(
            stage.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return f"failed ({error})"
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _stop(process)
        return f"out of time (stopped after {limit_s:.0f} s)"
    except BaseException:
        _stop(process)
        raise
    return "ok" if code == 0 else f"failed (exit {code}, see log.txt)"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask once, so that the cell in progress is left cleanly, then kill the group."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _write_summary(path: Path, endings: Sequence[Ending]) -> None:
    lines = [f"{e.stage:16} {e.seconds:7.1f} s  {e.outcome}\n" for e in endings]
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(lines))
    draft.replace(path)


def main(
    budget_s: Annotated[float, typer.Option(help="seconds for the whole run")] = 480.0,
    out: Annotated[Path, typer.Option(help="folder for records, log and summary")] = Path(
        "gpu-results"
    ),
    only: Annotated[list[str] | None, typer.Option(help="run only these stages")] = None,
) -> None:
    """Measure what this GPU can within the budget, the most valuable results first."""
    if machine.gpu() is None:
        raise RuntimeError("needs an NVIDIA GPU, none found (driver, or nvidia-ml-py missing)")
    plan = stages()
    unknown = set(only or []) - {stage.name for stage in plan}
    if unknown:
        known = ", ".join(stage.name for stage in plan)
        raise ValueError(f"no stage {', '.join(sorted(unknown))}; known: {known}")
    endings = run([s for s in plan if not only or s.name in only], out, budget_s)
    if not any(e.outcome == "ok" for e in endings):
        raise RuntimeError(f"no stage succeeded; see {out / 'log.txt'}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    sys.exit(cli.run(app))
