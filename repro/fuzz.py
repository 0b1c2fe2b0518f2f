"""Fuzz the operator, planned models and killed runs: random cases for a set time, each checked.

    python -m repro.fuzz --seconds 60            # random cases; the first seed is printed
    python -m repro.fuzz --seed 7 --seconds 60   # the same cases again
    python -m repro.fuzz --of planned            # one kind: attention, decode, planned, records
    python -m repro.fuzz --case '{"seqlen_q": 5, "causal": true}'   # one case
    python -m repro.fuzz --of planned --case '{"stages": ["noisy", "tanh"]}'

An attention problem is held to float64, a step of decoding too, whole and split. A planned model
(small, of stages that are hard to run again; with autocast, restarts, ranks, and compiled for any
number of rows) is held to the plain model, bit for bit. A measurement run that is killed and goes
on is held to one that is not.

The host backend runs with its checks on: a read out of bounds, an unwritten output or a race
between barriers fails a case like a wrong number does. A failing case is made as small as it
still fails and printed as one command. Exit status 1 if any case failed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from random import SystemRandom
from types import ModuleType
from typing import Any

from repro import cli
from repro.measuring.progress import say

__all__ = ["KINDS", "main"]

#: What is fuzzed, and the module with its Case, draw(seed, form), failure(case, device), smaller.
KINDS = {
    "attention": "repro.attention.cases",
    "decode": "repro.attention.decode_cases",
    "planned": "repro.checkpointing.cases",
    "records": "repro.killed_runs",
}
#: Cases that share one compiled form of the kernels: compiling takes seconds, a case less.
CASES_A_FORM = 12


def kind_of(case: Any) -> str:
    """Which of the KINDS a case is."""
    return next(k for k, module in KINDS.items() if isinstance(case, import_module(module).Case))


def _home(case: Any) -> ModuleType:
    """The module that draws and judges such a case."""
    return import_module(KINDS[kind_of(case)])


def complaint(case: Any, device: str) -> str | None:
    """What is wrong with a case, an exception included, in one line; None if nothing is."""
    try:
        found: str | None = _home(case).failure(case, device)
    except Exception as error:  # whatever it is, it is what the fuzzer looks for
        text = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {text[0]}"
    return found


def _kind(complaint: str | None) -> str | None:
    """What a complaint says, without numbers: a simpler case that fails otherwise is another."""
    return None if complaint is None else re.sub(r"\d+", "N", complaint).split(":")[0]


def shrink(case: Any, device: str, until: float) -> Any:
    """The smallest case reachable by single simplifications before the time ``until`` that fails
    in the same way."""
    wanted = _kind(complaint(case, device))
    while True:
        for simpler in _home(case).smaller(case):
            if time.monotonic() > until:
                return case
            if wanted is not None and _kind(complaint(simpler, device)) == wanted:
                case = simpler
                break
        else:
            return case


def command(case: Any, device: str) -> str:
    """The line that runs one case again."""
    kind = kind_of(case)
    of = "" if kind == "attention" else f" --of {kind}"
    where = "" if device == "cpu" else f" --device {device}"
    return f"python -m repro.fuzz{of}{where} --case '{case.to_json()}'"


def fuzz(
    seconds: float,
    seed: int,
    device: str,
    kinds: Sequence[str] = ("attention",),
    max_failures: int = 3,
) -> int:
    """Run random cases for ``seconds``, of the kinds in turns of ``CASES_A_FORM``; the number of
    failures found (at most ``max_failures``)."""
    say(
        f"fuzz: seed {seed}, {seconds:g} s on {device}, {' and '.join(kinds)}; again: --seed {seed}"
    )
    start = time.monotonic()
    done = dict.fromkeys(kinds, 0)
    failures = turn = 0
    while time.monotonic() - start < seconds and failures < max_failures:
        kind = kinds[turn // CASES_A_FORM % len(kinds)]
        turn += 1
        number = done[kind]
        done[kind] += 1
        case = import_module(KINDS[kind]).draw(seed + number, form=seed + number // CASES_A_FORM)
        wrong = complaint(case, device)
        if wrong is None:
            continue
        failures += 1
        say(f"failed {wrong}\n  {command(case, device)}\n  made smaller:")
        small = shrink(case, device, time.monotonic() + 60.0)
        say(f"FAILED {complaint(small, device)}\n  {command(small, device)}")
    counts = ", ".join(f"{count} {kind}" for kind, count in done.items())
    say(f"fuzz: {counts} cases, {failures} failed, {time.monotonic() - start:.0f} s")
    return failures


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m repro.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=None, help="of the first case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--of", choices=KINDS, default=None, help="default: all; of one --case: attention"
    )
    parser.add_argument("--case", default=None, help="one case as JSON instead of random ones")
    chosen = parser.parse_args(arguments)
    if not 0 <= chosen.seconds < float("inf"):
        parser.error(f"--seconds {chosen.seconds:g} is not a time from 0 on")

    from repro.attention.launcher import CHECKS_VARIABLE

    os.environ.setdefault(CHECKS_VARIABLE, "1")
    if chosen.case is not None:
        kind = chosen.of or "attention"
        wrong = complaint(import_module(KINDS[kind]).Case.from_json(chosen.case), chosen.device)
        say("passes" if wrong is None else f"FAILED {wrong}")
        return int(wrong is not None)
    seed = SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    kinds = tuple(KINDS) if chosen.of is None else (chosen.of,)
    return int(fuzz(chosen.seconds, seed, chosen.device, kinds) > 0)


if __name__ == "__main__":
    sys.exit(cli.program(main))
