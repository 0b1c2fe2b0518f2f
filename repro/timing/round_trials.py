"""What was tried on the Hopper loops: counted, predicted and, on a prototype, measured.

``kernels/timing/hopper_trials.csv`` holds the numbers of machine code and the clocks of the model
of an SM (``analysis.loop_model``) for each change, with the date and the commit at which both
variants can be compiled: macros ``TRY_…`` of the sources there, and a ``round_trials`` that wrote
the file. What was not kept is in no source any more. The measured gains are the prototype's
(``repro.timing.prototype``): of another kernel of the same design, on an H200.

``python -m repro.timing.round_trials`` writes the table of ``docs/pages/hopper.md``.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tabulate import tabulate

from kernels.pages import Block
from kernels.timing import hopper_time
from repro import cli
from repro.timing.time_validation import comparisons

CSV = hopper_time.LINES.with_name("hopper_trials.csv")
BLOCK = Block("hopper.md", "trials", "repro.timing.round_trials")
OURS = "d128 128x128, pingpong"
SHORT = "d128 128x128, persistent, pingpong"
BACKWARD = "d128 64x128"
#: What the compiler makes of a round, and what the model says it takes.
ROUND, CLOCKS = "instructions", "clocks a round"


@dataclass(frozen=True)
class Trial:
    """A change, the forms that stand for it, and what became of it.

    metric: of machine code, beside the instructions of a round; "" for none.
    clocks: the predicted metric.
    measured: variants of the prototype without and with it or what comes nearest, length and call.
    """

    change: str
    title: str
    forms: tuple[str, ...]
    verdict: str
    metric: str = ""
    clocks: str = CLOCKS
    measured: tuple[tuple[str, str, int, int], ...] = ()


TRIALS = (
    Trial(
        "turns", "turns", (OURS, SHORT, "d128 128x176, pingpong"),
        "kept at d = 128, as in FlashAttention-3: they hold the phase that the model is least sure "
        "of; a form without them is there to be timed",
        measured=(
            ("optimistic_128_no_turns", "optimistic_128", 16384, 5),
            ("B", "C1", 16384, 1),
        ),
    ),
    Trial(
        "turns", "turns", ("d64 192x128, persistent, pingpong",), "kept in persistent blocks too",
        measured=(
            ("d64_optimistic_no_turns", "d64_optimistic", 16384, 5),
            ("d64_optimistic_no_turns", "d64_optimistic", 2048, 5),
        ),
    ),
    Trial(
        "turns", "turns", ("d256 128x80, pingpong",),
        "not kept: 21 more descriptors by way of vector registers", metric="R2UR",
    ),
    Trial(
        "order", "K awaited between softmax and P V", (OURS,),
        "kept; the form without it is there to be timed", metric="MUFU under the product",
    ),
    Trial(
        "lazy rescale", "lazy rescale", (OURS, "d128 128x176, pingpong", "d64 192x128, pingpong"),
        "kept: fewer instructions", metric="FMUL",
        measured=(
            ("C3_persistent", "no_rescale", 16384, 3),
            ("C3_persistent", "lazy_176", 16384, 3),
        ),
    ),
    Trial(
        "mask by bits", "masks by bits (R2P)", (OURS, SHORT), "kept: masked rounds are shorter",
        metric="loop", clocks="clocks of 8 rounds",
    ),
    Trial(
        "two loops", "a masked and an unmasked loop", (OURS, "d64 192x128, pingpong"),
        "not kept: all of the loop twice for 3 to 7 instructions a round",
        measured=(
            ("backward_128_causal_branch", "backward_128_causal", 16384, 5),
            ("backward_128_causal_branch", "backward_128_causal", 2048, 5),
        ),
    ),
    Trial(
        "sums first", "sums before the wait, from tile to tile", (SHORT,),
        "kept: the softmax of the step is whole", metric="MUFU under the product, step",
        clocks="clocks of 8 rounds",
    ),
    Trial(
        "address once", "the address of dS held", (BACKWARD, "d64 128x128"),
        "not kept: issue slots do not set the pace of the backward, and 80 x 128 spills",
        metric="uniform",
    ),
)  # fmt: skip


@cache
def recorded() -> dict[tuple[str, str, str, str], tuple[float, float]]:
    """Without and with, by change, form, metric and version of NVRTC."""
    with CSV.open(encoding="utf-8") as file:
        return {
            (row["change"], row["form"], row["metric"], row["nvrtc"]): (
                float(row["without"]), float(row["with"]),
            )
            for row in csv.DictReader(file)
        }  # fmt: skip


def commit() -> tuple[str, str]:
    """Date and commit of the numbers."""
    with CSV.open(encoding="utf-8") as file:
        (found,) = {(row["date"], row["commit"]) for row in csv.DictReader(file)}
    return found


def numbers(trial: Trial, form: str, metric: str) -> str:
    """ "468 → 410", or of both versions "468 → 410; 452 → 404"."""
    found = []
    for version in sorted({key[3] for key in recorded()}):
        pair = recorded().get((trial.change, form, metric, version))
        if pair is not None:
            found.append(f"{pair[0]:.0f} → {pair[1]:.0f}")
    if not found:
        raise LookupError(f"nothing is recorded of {trial.change}, {form}, {metric}")
    return "; ".join(dict.fromkeys(found))


def gain(before: str, after: str, seqlen: int, call: int) -> float:
    """Measured rate of a variant of the prototype over that of another one in the same call."""
    rates = {c.variant: c.tflops for c in comparisons() if (c.seqlen, c.call) == (seqlen, call)}
    return rates[after] / rates[before] - 1


def measured(trial: Trial) -> str:
    """The prototype's gains, in the same words as the figure of predicted times."""
    return "; ".join(
        f"{100 * gain(a, b, seqlen, call):+.1f} % ({a} to {b}, N = {seqlen:,}, call {call})"
        for a, b, seqlen, call in trial.measured
    ) or "not measured"  # fmt: skip


def rows() -> Sequence[Sequence[str]]:
    """A row for every trial and form."""
    found = []
    for trial in TRIALS:
        for n, form in enumerate(trial.forms):
            counted = numbers(trial, form, ROUND)
            if trial.metric:
                counted += f" ({trial.metric} {numbers(trial, form, trial.metric)})"
            predicted = numbers(trial, form, trial.clocks)
            if trial.clocks != CLOCKS:
                predicted += f" ({trial.clocks})"
            last = (measured(trial), trial.verdict) if n == 0 else ("as above", "as above")
            found.append((trial.title, form, counted, predicted, *last))
    return found


def table() -> str:
    """The page's table."""
    headers = ("tried", "form", "instructions a round", "predicted clocks a round",
               "measured on the prototype", "kept or not")  # fmt: skip
    date, at = commit()
    note = f"Without → with, NVRTC 13.0; 13.5 where it differs. {date}, commit {at}."
    return f"{note}\n\n{tabulate(rows(), headers, tablefmt='pipe', disable_numparse=True)}"


def main(page: Path | None = None) -> None:
    """Writes the page's table."""
    BLOCK.write(table(), page)


if __name__ == "__main__":
    sys.exit(cli.program(main))
