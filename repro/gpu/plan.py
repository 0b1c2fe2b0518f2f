"""The stages of a GPU run: what each is worth, what it is expected to take, what it may take.

A stage may take a share of what is left of the budget when it begins, so that a slow one takes from
all that come later and none can take everything. What it is expected to take is printed beside it
by ``make gpu-run DRY=1`` and beside what it took by the run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from repro import experiments
from repro.measuring import machine

#: Seconds until a process has imported torch and made a context, warmed up; and on a cold machine.
START_S = 10.0
COLD_START_S = 60.0
#: Seconds that NVRTC takes for one module on one core.
MODULE_S = 6.0
#: Seconds of the guard for one implementation, once it is compiled.
GUARDED_S = 1.5
#: Experiments of the run in order of value; ``gpu-l2-`` stands for all whose names begin so.
VALUE = ("gpu-throughput", "gpu-traffic", "gpu-l2-", "gpu-sm-units")
#: Then these, every other one of ours, and PyTorch's own kernels at the shapes of the papers' figures.
REST = ("gpu-optimistic", "gpu-ceilings", "gpu-forms", "gpu-features", "gpu-ladder", "gpu-memory", "gpu-", "fig", "l2-")
#: The first whose kernels are not those of plain attention (``kernels.prebuild``).
FIRST_OF_OTHER_KERNELS = "gpu-features"


@dataclass(frozen=True)
class Stage:
    """A step of the run."""

    name: str
    command: Sequence[str]
    why: str
    #: Of what is left when it begins.
    share: float = 0.5
    predicted_s: float = 0.0
    #: Skip the stage when less than this is left; a stage that resumes can use any remainder.
    least_s: float = 10.0


def stages(python: str = sys.executable, cores: int | None = None) -> list[Stage]:
    """The stages in order of value. ``cores``: of the machine it will run on."""
    ahead, rest = _compile_s(cores or machine.cores())
    listed = [
        Stage(
            "warm-up",
            [python, "-m", "repro.instruments.warm_up"],
            "a cold start of torch, cuBLAS and CuPy, before any limit counts",
            share=0.5,
            predicted_s=COLD_START_S,
        ),
        Stage(
            "compile",
            [python, "-m", "kernels.prebuild", "--plain"],
            "plain attention's kernels at once on all cores, so that no stage waits for a compiler",
            share=0.35,
            predicted_s=ahead,
        ),
        Stage(
            "guard",
            [python, "-m", "repro.instruments.hopper_guard"],
            "which Hopper kernels are right and come back; later stages leave out the others",
            share=0.3,
            predicted_s=_guard_s(),
        ),
    ]
    compile_rest = Stage(
        "compile-rest", [python, "-m", "kernels.prebuild"], "the kernels of what follows", share=0.35, predicted_s=rest
    )
    measured: list[str] = []
    for prefix in (*VALUE, *REST):
        if prefix == FIRST_OF_OTHER_KERNELS:
            listed.append(compile_rest)
        names = [n for n in on_a_card() if n.startswith(prefix) and n not in measured]
        measured += names
        listed += [_measure(python, name, prefix in VALUE) for name in names]
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    return [
        *listed,
        Stage("tests", [*tests, "--maxfail=20"], "the whole GPU suite", predicted_s=90),
        Stage(
            "sanitizer",
            [python, "-m", "repro.instruments.sanitizer"],
            "memcheck and racecheck on small shapes",
            share=1.0,
            predicted_s=110,
        ),
    ]


def on_a_card() -> list[str]:
    """The experiments that are measured on a GPU."""
    return [name for name in experiments.names() if experiments.experiment(name).device == "cuda"]


def _measure(python: str, name: str, decisive: bool) -> Stage:
    one = experiments.experiment(name)
    return Stage(
        name,
        # What is on record of PyTorch's own kernels is of another day: measured anew.
        [python, "-m", "repro.measure", name, *([] if name.startswith("gpu-") else ["--again"])],
        experiments.title(one.name),
        share=0.75 if decisive else 0.35,
        predicted_s=START_S + one.seconds,
    )


def _compile_s(cores: int) -> tuple[float, float]:
    """Seconds for the kernels of plain attention, and for all others."""
    from kernels import prebuild

    first = len(prebuild.modules(prebuild.plain()))
    others = len(prebuild.modules(prebuild.kernels())) - first
    each = MODULE_S / max(cores, 1)
    return START_S + each * first, START_S + each * others


def _guard_s() -> float:
    from repro.instruments.guard_lines import NAMES

    return START_S + GUARDED_S * len(NAMES)


def plan_text(plan: Sequence[Stage], budget_s: float) -> str:
    """The plan as a table: predicted seconds, the limit, and what fits.

    A limit is the stage's share of what would be left if every stage before it took what is
    predicted, or its own limit if that is less.
    """
    left, lines = budget_s, [f"{'stage':16} {'predicted':>10} {'limit':>8} {'left':>8}"]
    for stage in plan:
        if left < stage.least_s:
            lines.append(f"{stage.name:16} {stage.predicted_s:8.0f} s  skipped, {left:.0f} s left")
            continue
        limit = stage.share * left
        cut = ", cut short" if stage.predicted_s > limit else ""
        left -= min(limit, stage.predicted_s)
        lines.append(f"{stage.name:16} {stage.predicted_s:8.0f} s {limit:6.0f} s {left:6.0f} s  {stage.why}{cut}")
    total = sum(stage.predicted_s for stage in plan)
    lines.append(f"{'all of it':16} {total:8.0f} s of {budget_s:.0f} s")
    return "\n".join(lines)
