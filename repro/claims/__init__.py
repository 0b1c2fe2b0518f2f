"""The claims that are judged, in one place: every verdict follows from numbers, none is typed.

``CATALOGUE`` lists what must be judged: the papers' headlines, the study notes' claims K1 to K16
and the faults F1 to F7 found in them, and what this package says of its own models and kernels. A
claim is judged by a figure (``figures/NAME.py``, next to the data it draws) or by a function here;
both take a tidy frame and return :class:`Claim` objects (``protocol`` says how a verdict follows).
What has no data is "not tested" instead of vanishing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from repro.claims.catalogue import CATALOGUE, Entry
from repro.claims.protocol import Claim, Evidence, Origin, Part, Verdict, agreement
from repro.claims.rows import NOT_MEASURED, Source, claim

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


def sources() -> tuple[Source, ...]:
    """The claims judged here (the others are judged by figures)."""
    from repro.claims import attention, checkpointing, chen, faults, states

    modules = (attention, chen, checkpointing, faults, states)
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
