"""Every option of attention, once: a row of :data:`FEATURES` is all that the package knows of it.

Whoever goes through options reads this table: drivers and dispatch (who takes what), the compiled
forms (macros), predictions and sums (what an option moves), the float64 reference (what it
computes), the command line, the coverage page, random cases. The rows are in ``analysis.options``,
what a row can say in ``analysis.feature``; kernels compute an option in ``kernels/include``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from types import MappingProxyType

from analysis.feature import PASSES, Feature, Given, Walk, changed
from analysis.options import masks, scores, walks
from analysis.problem import Problem
from analysis.shapes import KernelBytes

FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        each.name: each
        for each in (
            masks.CAUSAL,
            masks.KEY_MASK,
            scores.DROPOUT,
            masks.BLOCK_MASK,
            masks.WINDOW,
            scores.SOFTCAP,
            scores.ALIBI,
            scores.BIAS,
            scores.SINK_LOGITS,
            walks.FP8,
            masks.PACKED,
            walks.SAWTOOTH,
            scores.BIAS_GRADIENT,
            scores.SINK_GRADIENT,
            scores.LSE_GRADIENT,
            walks.DETERMINISTIC,
        )
    }
)
"""Name -> option, in the order that messages name them in and that scores are changed in."""


def features_of(problem: Problem) -> frozenset[str]:
    """Names of the options that a problem has."""
    return frozenset(name for name, each in FEATURES.items() if each.used(problem))


def refused(algorithm: str, pass_: str, features: Iterable[str]) -> str | None:
    """Why an algorithm's pass does not run with these options, or None: those that its kernels do
    not take, as the drivers call them."""
    asked = set(features)
    names = [each.argument for each in FEATURES.values() if each.name in asked and not each.taken(algorithm, pass_)]
    return f"{algorithm} does not take {', '.join(names)}" if names else None


def asked_for(given: Given) -> list[Feature]:
    """The options that a call's arguments ask for. TypeError for an argument of none."""
    known = {name for each in FEATURES.values() for name in each.given}
    unknown = given.keys() - known
    if unknown:
        raise TypeError(f"no option is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return [each for each in FEATURES.values() if each.given and _there(given.get(each.given[0]))]


def specials_of(problem: Problem) -> int:
    """Special-function operations that a problem's options add to each score."""
    dtype = problem.shape.dtype
    return sum(FEATURES[name].specials.get(dtype, 0) for name in features_of(problem))


def with_options(kernels: KernelBytes, walk: Walk, *, beside: bool = True) -> KernelBytes:
    """The bytes of a pass, its options' included.

    walk: of the kernel that makes scores. beside: with what options cost in other kernels.
    """
    found = {kernel: dict(entries) for kernel, entries in kernels.items()}
    around: dict[str, dict[tuple[str, str], int]] = {}
    for name, each in FEATURES.items():
        if not _there(walk.options.get(name, getattr(walk.shape, name, None))):
            continue
        if each.reads is not None:
            found[walk.entry] |= {(tensor, "read"): count for tensor, count in each.reads(walk).items()}
        if each.beside is not None and beside:
            for kernel, entries in each.beside(walk).items():
                into = found[kernel] if kernel in found else around.setdefault(kernel, {})
                into |= entries
    return {**around, **found}


def _there(value: object) -> bool:
    return value is not None and value is not False


def with_option(name: str, random: Random, problem: Problem) -> Problem | None:
    """The problem with an option drawn at random, or None where it does not go with the others."""
    option, others = FEATURES[name], [FEATURES[other] for other in features_of(problem)]
    packed = name == "packed" or problem.lengths is not None
    if packed and not all(each.with_packed for each in (option, *others)):
        return None
    changes = option.drawn(random, problem)
    return None if changes is None else changed(problem, changes)


def draw(random: Random, problem: Problem, chance: float = 0.25) -> Problem:
    """The problem with each option that goes with those before it, by ``chance``."""
    for name in FEATURES:
        if random.random() < chance:
            problem = with_option(name, random, problem) or problem
    return problem


__all__ = [
    "FEATURES",
    "PASSES",
    "Feature",
    "asked_for",
    "draw",
    "features_of",
    "refused",
    "specials_of",
    "with_option",
    "with_options",
]
