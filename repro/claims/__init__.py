"""The claims that are judged, in one place: every verdict follows from numbers, none is typed.

``CATALOGUE`` lists what must be judged: the papers' headlines, the study notes' claims K1 to K16
and the faults F1 to F7 found in them, and what this package says of its own models and kernels. A
claim is judged by a figure (``figures/NAME.py``, next to the data it draws) or by a function here;
both take a tidy frame and return :class:`Claim` objects (``protocol`` says how a verdict follows).
What has no data is "not tested" instead of vanishing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repro.claims.catalogue import CATALOGUE, Entry
from repro.claims.protocol import Claim, Evidence, Origin, Part, Verdict, agreement

if TYPE_CHECKING:
    import pandas

__all__ = [
    "CATALOGUE",
    "NOT_MEASURED",
    "Claim",
    "Entry",
    "Evidence",
    "Origin",
    "Part",
    "Source",
    "Verdict",
    "agreement",
    "claim",
    "judge",
    "missing",
    "sources",
]

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Source:
    """A function that judges one claim from the frame of these experiments."""

    claim: str
    experiments: tuple[str, ...]
    judge: Callable[[pandas.DataFrame], Claim]


def sources() -> tuple[Source, ...]:
    """The claims judged here (the others are judged by figures)."""
    from repro.claims import attention, checkpointing, faults, states

    modules = (attention, checkpointing, faults, states)
    return tuple(source for module in modules for source in module.SOURCES)


def judge(*, local: bool = True) -> list[Claim]:
    """Judge them from what is on record; ``local=False`` reads committed records only."""
    from repro.experiments import tidy

    frames: dict[tuple[str, ...], pandas.DataFrame] = {}
    found = []
    for source in sources():
        if source.experiments not in frames:
            frames[source.experiments] = tidy(source.experiments, local=local)
        found.append(source.judge(frames[source.experiments]))
    return found


def missing(judged: Iterable[str]) -> list[Claim]:
    """Rows without evidence for the catalogue's claims that nothing has judged."""
    known = set(judged)
    return [claim(name, parts=()) for name in CATALOGUE if name not in known]


def claim(
    name: str,
    *,
    parts: Sequence[Part],
    predicted: str = "-",
    measured: str = NOT_MEASURED,
    published: str = "-",
    conditions: str | None = None,
) -> Claim:
    """A claim with the catalogue's wording; ``conditions`` replaces the catalogue's."""
    if name not in CATALOGUE:
        raise ValueError(f"{name!r} is not in the catalogue of claims")
    entry = CATALOGUE[name]
    return Claim(
        name=name, statement=entry.statement, source=entry.source, origin=entry.origin,
        predicted=predicted, measured=measured, published=published, parts=tuple(parts),
        unlike=entry.conditions if conditions is None else conditions, chosen=entry.chosen,
        command=entry.command,
    )  # fmt: skip
