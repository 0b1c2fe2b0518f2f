"""Which Hopper kernels work on this card, asked of processes that may hang.

    python -m repro.instruments.hopper_guard [--within SECONDS]

A kernel that waits for a barrier that no thread arrives at never ends, and neither does its
process. So before anything times or counts these kernels, another process runs each of them on
problems that fill the card several times over (``hopper_cases``) and compares. It says what it is
at. If it hangs or dies, the implementation it was at is refused, its process group is killed, and a
new process goes on with the next one: a failure costs one implementation, not the run, and never
another implementation. Limits count from when a process has started and compiled.

Processes of one run share what was found: in the file that ``REPRO_HOPPER_CHECKED`` names, written
after every implementation. ``kernels.dispatch`` leaves out what is refused there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryFile
from threading import Thread

from kernels.dispatch import CHECKED_VARIABLE
from repro import cli
from repro.instruments.guard_lines import BUILT, NAMES, READY, TRIED, WRONG
from repro.measuring import processes
from repro.measuring.progress import say

COMMAND = (sys.executable, "-m", "repro.instruments.hopper_cases")


@dataclass(frozen=True)
class Limits:
    """Seconds that a process may be silent: until it has started, compiled, run the cases."""

    start_s: float = 180.0
    build_s: float = 120.0
    run_s: float = 20.0


@dataclass
class Findings:
    """Implementations that are right, and why others are refused."""

    right: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def reason(self, name: str) -> str | None:
        """Why a Hopper implementation must not be used, or None."""
        if name in self.right and name not in self.refused:
            return None
        return self.refused.get(name, "the check of the Hopper kernels has not come to it")

    @classmethod
    def read(cls, path: Path) -> Findings:
        """What a run has found so far. ValueError names a file that is not of this kind."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not what the guard of the kernels writes ({error})") from None

    def write(self, path: Path) -> None:
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        draft.replace(path)


def refusal(name: str) -> str | None:
    """Why an implementation must not be used here, or None. All are tried at the first question,
    unless a file of the run says what was found."""
    return _findings().reason(name)


@cache
def _findings() -> Findings:
    where = os.environ.get(CHECKED_VARIABLE)
    if where is None:
        return check(NAMES)
    return shared(Path(where))


def shared(path: Path, names: Sequence[str] = NAMES, command: Sequence[str] = COMMAND) -> Findings:
    """What the file says, which is written by checking if it is not there yet."""
    if path.exists():
        return Findings.read(path)
    return check(names, command, note=lambda found: found.write(path))


def check(
    names: Sequence[str],
    command: Sequence[str] = COMMAND,
    limits: Limits | None = None,
    *,
    within_s: float | None = None,
    note: Callable[[Findings], object] = lambda found: None,
) -> Findings:
    """Try the implementations one after another. ``note`` is called with what is known so far.

    within_s: seconds for all of them; what is not reached is refused as not tried.
    """
    limits, found = limits or Limits(), Findings()
    ends = None if within_s is None else time.monotonic() + within_s
    left = list(names)
    while left:
        reason = _one_process(left, command, limits, found, ends, lambda: note(found))
        left = [name for name in names if name not in found.right and name not in found.refused]
        if reason is None or not left:
            break
        stopped, why = reason
        # Before it was ready it was at none of them: the card does not answer.
        for name in left if stopped is None else [stopped]:
            found.refused[name] = why
        left = [name for name in left if name not in found.refused]
        note(found)
    return found


def _one_process(
    names: Sequence[str],
    command: Sequence[str],
    limits: Limits,
    found: Findings,
    ends: float | None,
    note: Callable[[], object],
) -> tuple[str | None, str] | None:
    """Let a process try the names; what ended it early: (the name it was at, why), or None."""
    # A file, not a pipe: a pipe that nobody reads yet holds up a process with much to say.
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as errors_file:
        process = processes.start(
            [*command, *names], stdout=subprocess.PIPE, stderr=errors_file, encoding="utf-8", errors="replace"
        )
        lines: Queue[str | None] = Queue()
        Thread(target=_read, args=(process, lines), daemon=True).start()
        left = list(names)
        at, doing, limit_s = None, "did not start", limits.start_s
        try:
            while True:
                try:
                    line = lines.get(timeout=_at_most(limit_s, ends))
                except Empty:
                    if not left:  # its own end hangs, which takes nothing from what was tried
                        return None
                    if ends is not None and time.monotonic() >= ends:
                        return None, "not tried: the time for checking the Hopper kernels was over"
                    return at, f"{doing} within {limit_s:g} s"
                if line is None:
                    break
                word, *rest = line.split("\t")
                if word in (TRIED, WRONG) and rest[0] in left:
                    left.remove(rest[0])
                    if word == TRIED:
                        found.right.append(rest[0])
                    else:
                        found.refused[rest[0]] = "\t".join(rest[1:]).strip()
                    note()
                if word in (READY, TRIED, WRONG):
                    at = left[0] if left else None
                    doing, limit_s = "did not compile", limits.build_s
                elif word == BUILT:
                    doing, limit_s = "did not finish", limits.run_s
            status = process.wait(limits.run_s)
        except subprocess.TimeoutExpired:
            return None if not left else (at, f"{doing} within {limits.run_s:g} s")
        finally:
            processes.kill(process)
        if status == 0 or not left:
            return None if not left else (at, "the check ended before it came to it")
        errors_file.seek(0)
        errors = errors_file.read().strip()
    return at, (errors or f"the Hopper check ended with {status}").splitlines()[-1]


def _at_most(limit_s: float, ends: float | None) -> float:
    return limit_s if ends is None else max(0.0, min(limit_s, ends - time.monotonic()))


def _read(process: subprocess.Popen[str], lines: Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Check every Hopper implementation and say what is refused, if anything."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--within", type=float, default=600.0, help="seconds for all of them")
    within = processes.time_left(parser.parse_args(arguments).within)
    where = os.environ.get(CHECKED_VARIABLE)
    with processes.stopped_politely():
        note = (lambda found: found.write(Path(where))) if where else (lambda found: None)
        found = check(NAMES, within_s=within, note=note)
    report(found.refused)


def report(refused: Mapping[str, str]) -> None:
    """One line for each that is refused. RuntimeError with their number if there is one."""
    for name, reason in refused.items():
        say(f"{name}: {reason}")
    if refused:
        raise RuntimeError(f"{len(refused)} of {len(NAMES)} Hopper implementations are refused")


if __name__ == "__main__":
    processes.die_with_parent()
    sys.exit(cli.program(main))
