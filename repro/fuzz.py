"""Fuzz the attention operator: random problems for a set time, each held to float64.

    python -m repro.fuzz --seconds 60            # random cases; the first seed is printed
    python -m repro.fuzz --seed 7 --seconds 60   # the same cases again
    python -m repro.fuzz --case '{"seqlen_q": 5, "causal": true}'   # one case

The host backend runs with its checks on: a read out of bounds, an unwritten output or a race
between barriers fails a case like a wrong number does. A failing case is made as small as it
still fails and printed as one command. Exit status 1 if any case failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from random import SystemRandom
from typing import TYPE_CHECKING

from repro.progress import say

if TYPE_CHECKING:
    from repro.attention.cases import Case

__all__ = ["main"]

#: Cases that share one compiled form of the kernels: compiling takes seconds, a case less.
CASES_A_FORM = 12


def complaint(case: Case, device: str) -> str | None:
    """What is wrong with a case, an exception included, in one line; None if nothing is."""
    from repro.attention.cases import failure

    try:
        return failure(case, device)
    except Exception as error:  # whatever it is, it is what the fuzzer looks for
        text = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {text[0]}"


def shrink(case: Case, device: str, until: float) -> Case:
    """The smallest failing case reachable by single simplifications before the time ``until``."""
    from repro.attention.cases import smaller

    while True:
        for simpler in smaller(case):
            if time.monotonic() > until:
                return case
            if complaint(simpler, device):
                case = simpler
                break
        else:
            return case


def command(case: Case, device: str) -> str:
    """The line that runs one case again."""
    where = "" if device == "cpu" else f" --device {device}"
    return f"python -m repro.fuzz{where} --case '{case.to_json()}'"


def fuzz(seconds: float, seed: int, device: str, max_failures: int = 3) -> int:
    """Run random cases for ``seconds``; the number of failures found (at most ``max_failures``)."""
    from repro.attention.cases import draw

    say(f"fuzz: seed {seed}, {seconds:g} s on {device}; again: --seed {seed}")
    start = time.monotonic()
    done = failures = 0
    while time.monotonic() - start < seconds and failures < max_failures:
        case = draw(seed + done, form=seed + done // CASES_A_FORM)
        done += 1
        if complaint(case, device) is None:
            continue
        failures += 1
        small = shrink(case, device, time.monotonic() + 60.0)
        say(f"FAILED {complaint(small, device)}\n  {command(small, device)}")
    say(f"fuzz: {done} cases, {failures} failed, {time.monotonic() - start:.0f} s")
    return failures


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m repro.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=None, help="of the first case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", default=None, help="one case as JSON instead of random ones")
    chosen = parser.parse_args(arguments)

    from repro.attention.launcher import CHECKS_VARIABLE

    os.environ.setdefault(CHECKS_VARIABLE, "1")
    if chosen.case is not None:
        from repro.attention.cases import Case

        wrong = complaint(Case.from_json(chosen.case), chosen.device)
        say("passes" if wrong is None else f"FAILED {wrong}")
        return int(wrong is not None)
    seed = SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    return int(fuzz(chosen.seconds, seed, chosen.device) > 0)


if __name__ == "__main__":
    sys.exit(main())
